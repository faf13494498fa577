// Where a table does not fit, its rows become cards: each cell below the heading of its column. Without scripts it is moved sideways.
const MOST_COLUMNS = 14; // a matrix stays one

// A column is too narrow where text stands in eight lines or more of a few words, or, of three columns, in five lines of a word or two.
function hasNarrowColumn(table, numColumns) {
  const text = document.createRange();
  return [...table.querySelectorAll("tbody td")].some(cell => {
    text.selectNodeContents(cell);
    const tall_px = text.getBoundingClientRect().height;
    return cell.clientWidth < 240 && tall_px > 140 || numColumns > 2 && cell.clientWidth < 130 && tall_px > 80;
  });
}

function layOutTables() {
  for (const table of document.querySelectorAll(".md-typeset table:not(.highlighttable)")) {
    const heads = [...table.querySelectorAll("thead th")].map(head => head.textContent);
    table.removeAttribute("data-cards"); // no class: the theme draws tables that have none
    const room = table.closest(".md-typeset__scrollwrap");
    if (!room || heads.length > MOST_COLUMNS) continue;
    if (room.scrollWidth <= room.clientWidth && !hasNarrowColumn(table, heads.length)) continue;
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, index) => {
        cell.dataset.head = heads.length > 2 || !index ? heads[index] : ""; // of two columns the second needs no name
        cell.toggleAttribute("data-wide", cell.textContent.length > 18);
      });
    const isShort = [...table.querySelectorAll("tbody td:not(:first-child)")].every(cell => cell.querySelector("code") || cell.textContent.length < 33);
    table.setAttribute("data-cards", isShort ? "short" : "");
  }
}

// A flag such as `--batch-size`, a program's name, and names in tables, stay on one line. A style alone cannot tell them from other code, which may break.
function keepNamesWhole() {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
    const cell = code.closest("td");
    const whole = !cell ? /^(--?[\w-]{1,22}=?|moreh-[\w-]{1,14})$/ : cell.cellIndex ? /^(--?[\w-]{1,22}|\w{1,18})$/ : /^\S{1,24}$/;
    code.classList.toggle("name", whole.test(code.textContent));
  }
}

// Plans, paths and long names break between their parts, where they have to, and commands not within a flag.
function letPartsBreak() {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code:not(.name)")) {
    if (code.childElementCount) continue;
    const parted = code.textContent.length > 16 ? code.innerHTML.replace(/[,/_=](?=\w)/g, "$&<wbr>") : code.innerHTML;
    code.innerHTML = parted.replace(/(^|\s)(--[\w-]+|moreh-[\w-]+)/g, '$1<span class="name">$2</span>');
  }
}

// On phones a long line of code goes on below its beginning, two characters further in. What is drawn or set in columns is moved sideways.
function indentLines() {
  for (const line of document.querySelectorAll('.md-typeset .highlight:not(.language-text) pre > code > span[id^="__line"]'))
    line.style.setProperty("--indent", line.textContent.match(/^[ +-]*/)[0].length + 2);
  for (const mark of document.querySelectorAll(".md-typeset .language-python pre > code .p"))
    if (/[(\[{]$/.test(mark.textContent)) mark.after(document.createElement("wbr")); // before the first argument
}

// Commands and printed lines are broken on every screen.
const DRAWN = /[\u2500-\u259f]|[-=]{4,}|\S {3,}\S/;
function breakLines() {
  for (const code of document.querySelectorAll(".md-typeset :is(.language-sh, .language-bash, .language-text) pre > code"))
    if (!code.closest(".language-text") || !DRAWN.test(code.textContent)) {
      code.classList.add("broken");
      keepFlagsWhole(code);
    }
}

// A table drawn with characters gets the size at which its widest row fits. On phones it keeps its size and is moved sideways.
const ROW = /[\u2500-\u259f]|[-=]{8,}/, BESIDE_ROWS = /^ {8,}\S|^\|.*\|$/;
function fitDrawnTables() {
  for (const code of document.querySelectorAll(".md-typeset .language-text pre > code")) {
    const lines = code.textContent.split("\n");
    if (!lines.some(line => ROW.test(line))) continue;
    code.style.fontSize = "";
    if (innerWidth < 720) continue;
    const widest = document.createElement("span"), style = getComputedStyle(code);
    widest.style.cssText = "display: inline-block; white-space: pre";
    widest.textContent = lines.filter(line => ROW.test(line) || BESIDE_ROWS.test(line)).join("\n");
    code.append(widest);
    const fits = (code.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)) / (widest.offsetWidth + 1);
    widest.remove();
    if (fits < 1) code.style.fontSize = `${parseFloat(style.fontSize) * fits}px`;
  }
}

// A line breaks before or behind a flag, not at a hyphen in it.
function keepFlagsWhole(code) {
  const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), all = [];
  while (texts.nextNode()) all.push(texts.currentNode);
  for (const text of all) {
    const parts = text.data.split(/(--[\w-]{1,40})/);
    text.replaceWith(...parts.map((part, index) => {
      if (index % 2 == 0) return part;
      const flag = document.createElement("span");
      flag.className = "name";
      flag.textContent = part;
      return flag;
    }));
  }
}

// Where the site is published with the repository's address, the command that clones it has that address.
function nameRepository() {
  const repository = document.querySelector(".md-source")?.href;
  if (!repository) return;
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replace("https://REPOSITORY", repository);
}

addEventListener("load", nameRepository);
addEventListener("load", indentLines);
addEventListener("load", keepNamesWhole);
addEventListener("load", breakLines);
addEventListener("load", letPartsBreak);
addEventListener("load", layOutTables);
addEventListener("load", fitDrawnTables);
addEventListener("resize", fitDrawnTables);
addEventListener("resize", layOutTables);
addEventListener("toggle", layOutTables, true); // a table that was folded away had no width
