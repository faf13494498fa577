// Where a table does not fit, its rows become cards: each cell below the heading of its column. Without scripts it is moved sideways.
const MOST_COLUMNS = 14; // a matrix stays one
const NARROW_PX = 130, TALL_PX = 80; // a column of single words: text as narrow as this, in five lines or more

function hasColumnOfWords(table) {
  const text = document.createRange();
  return [...table.querySelectorAll("tbody td")].some(cell => {
    text.selectNodeContents(cell);
    return cell.clientWidth < NARROW_PX && text.getBoundingClientRect().height > TALL_PX;
  });
}

function layOutTables() {
  for (const table of document.querySelectorAll(".md-typeset table:not(.highlighttable)")) {
    const heads = [...table.querySelectorAll("thead th")].map(head => head.textContent);
    table.removeAttribute("data-cards"); // no class: the theme draws tables that have none
    const room = table.closest(".md-typeset__scrollwrap");
    if (!room || heads.length > MOST_COLUMNS) continue;
    if (room.scrollWidth <= room.clientWidth && (heads.length < 3 || !hasColumnOfWords(table))) continue;
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, index) => { cell.dataset.head = heads[index]; });
    table.setAttribute("data-cards", "");
  }
}

// A flag such as `--batch-size`, and a name in a first column, stay on one line. A style alone cannot tell them from other code, which may break.
function keepNamesWhole() {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code"))
    code.classList.toggle("name", (code.closest("td:first-child") ? /^\S{1,24}$/ : /^--?[\w-]{1,22}$/).test(code.textContent));
}

// Plans, paths and long names break between their parts, where they have to, and commands not within a flag.
function letPartsBreak() {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code:not(.name)"))
    if (code.textContent.length > 16 && !code.childElementCount)
      code.innerHTML = code.innerHTML.replace(/[,/_=](?=\w)/g, "$&<wbr>").replace(/(^|\s)(--[\w-]+)/g, '$1<span class="name">$2</span>');
}

addEventListener("load", keepNamesWhole);
addEventListener("load", letPartsBreak);
addEventListener("load", layOutTables);
addEventListener("resize", layOutTables);
addEventListener("toggle", layOutTables, true); // a table that was folded away had no width
