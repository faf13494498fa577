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

addEventListener("load", layOutTables);
addEventListener("resize", layOutTables);
addEventListener("toggle", layOutTables, true); // a table that was folded away had no width
