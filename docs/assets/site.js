// Where a table does not fit, its rows become cards: each cell below the heading of its column. Without scripts it is moved sideways.
const MOST_COLUMNS = 14; // a matrix stays one

function layOutTables() {
  for (const table of document.querySelectorAll(".md-typeset table:not(.highlighttable)")) {
    const heads = [...table.querySelectorAll("thead th")].map(head => head.textContent);
    table.removeAttribute("data-cards"); // no class: the theme draws tables that have none
    const room = table.closest(".md-typeset__scrollwrap");
    if (!room || heads.length > MOST_COLUMNS || room.scrollWidth <= room.clientWidth) continue;
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, index) => { cell.dataset.head = heads[index]; });
    table.setAttribute("data-cards", "");
  }
}

// A flag such as `--batch-size` stays on one line. A style alone cannot tell it from other code, which may break.
function keepFlagsWhole() {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code"))
    code.classList.toggle("flag", /^--?[\w-]{1,22}$/.test(code.textContent));
}

addEventListener("load", keepFlagsWhole);
addEventListener("load", layOutTables);
addEventListener("resize", layOutTables);
addEventListener("toggle", layOutTables, true); // a table that was folded away had no width
