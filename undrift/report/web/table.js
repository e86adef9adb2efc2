"use strict";
// Tables that can be sorted, and saved as CSV, LaTeX or Markdown.

const MANY_ROWS = 25; // with more, a table scrolls by itself

const textOf = (cell) => cell[0];
const valueOf = (cell) => (cell.length > 1 ? cell[1] : cell[0]);

/** The order of the rows, by the values of a column; what has none comes last. */
function sorted(rows, column, down) {
  const places = rows.map((row, k) => k);
  return places.sort((a, b) => {
    const [x, y] = [valueOf(rows[a][column]), valueOf(rows[b][column])];
    if (x == null || y == null) return (x == null) - (y == null) || a - b;
    const order =
      typeof x === "number" && typeof y === "number"
        ? x - y
        : String(x).localeCompare(String(y), "en", {numeric: true});
    return (down ? -order : order) || a - b;
  });
}

/**
 * A table element. `sort` is [column, down] or null for the given order, and onsort is told the next one.
 * keyOf(row), if given, puts the line's colour before the first cell.
 */
function drawTable(table, sort, onsort, keyOf = null) {
  const order = sort && table.columns[sort[0]] ? sorted(table.rows, sort[0], sort[1]) : table.rows.map((row, k) => k);
  const best = table.columns.map((column, k) => bestOf(table.rows, k, column.better));
  const head = table.columns.map((column, k) => {
    const mine = sort && sort[0] === k;
    const next = mine ? [k, !sort[1]] : [k, column.better === "higher"];
    const button = make(
      "button",
      {type: "button", class: "sort", onclick: () => onsort(next)},
      column.name,
      make("span", {"aria-hidden": "true", class: "arrow"}, mine ? (sort[1] ? "▼" : "▲") : ""),
    );
    return make("th", {scope: "col", "aria-sort": mine ? (sort[1] ? "descending" : "ascending") : null}, button);
  });
  const body = order.map((place) =>
    make(
      "tr",
      {},
      table.rows[place].map((cell, k) => {
        const number = typeof valueOf(cell) === "number";
        const kind = [
          number ? "number" : "words",
          number && valueOf(cell) === best[k] ? "best" : "",
          cell[2]?.mark ? `state ${cell[2].mark.replace(/\W/g, "-")}` : "",
        ]
          .join(" ")
          .trim();
        const mark = k === 0 && keyOf ? swatch(keyOf(place)) : null;
        return make(k ? "td" : "th", {class: kind, scope: k ? null : "row"}, mark, textOf(cell), shareOf(cell));
      }),
    ),
  );
  const element = make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
  return make(
    "div",
    {
      class: table.rows.length > MANY_ROWS ? "wide tall" : "wide",
      tabindex: "0",
      role: "group",
      "aria-label": `Table: ${table.title}`,
    },
    element,
  );
}

/** A bar under the text of a cell that says what share is done. */
function shareOf(cell) {
  if (cell[2]?.share == null) return null;
  const bar = make("span", {class: "share", "aria-hidden": "true"}, make("span", {}));
  bar.firstChild.style.width = `${100 * cell[2].share}%`;
  return bar;
}

/** The best value of a column that has a better side and more than one value. */
function bestOf(rows, column, better) {
  const values = rows.map((row) => valueOf(row[column])).filter((value) => typeof value === "number");
  if (!better || values.length < 2) return null;
  return better === "higher" ? Math.max(...values) : Math.min(...values);
}

const plainRows = (table) => [table.columns.map((column) => column.name), ...table.rows.map((row) => row.map(textOf))];

function tableSavers(table) {
  return savers(table.title, {
    CSV: () => download(table.title, "csv", asCsv(plainRows(table))),
    LaTeX: () => download(table.title, "tex", asLatex(table)),
    Markdown: () => download(table.title, "md", asMarkdown(plainRows(table))),
  });
}

/** Text that a spreadsheet would take for a formula gets a quote before it; numbers stay numbers. */
function asCsv(rows) {
  const cell = (value) => {
    let text = value == null ? "" : String(value).replace(/^−(?=[\d.])/, "-");
    if (/^[=+\-@\t\r]/.test(text) && !(text === "-" || Number.isFinite(Number(text)))) text = `'${text}`;
    return /[",\n\r;]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function asMarkdown(rows) {
  const cell = (text) =>
    String(text)
      .replace(/[\\|`*_<>\[\]]/g, "\\$&")
      .replace(/\s+/g, " ");
  const [head, ...body] = rows.map((row) => `| ${row.map(cell).join(" | ")} |`);
  return [head, `| ${rows[0].map(() => "---").join(" | ")} |`, ...body].join("\n") + "\n";
}

/** With the booktabs package; the best of a column is bold. */
function asLatex(table) {
  const special = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "−": "$-$",
    "–": "--",
    "<": "$<$",
    ">": "$>$",
  };
  const cell = (text) => String(text).replace(/[\\{}$&#^_~%±−–<>]/g, (letter) => special[letter] || `\\${letter}`);
  const best = table.columns.map((column, k) => bestOf(table.rows, k, column.better));
  const body = table.rows.map(
    (row) =>
      row
        .map((each, k) =>
          best[k] != null && valueOf(each) === best[k] ? `\\textbf{${cell(textOf(each))}}` : cell(textOf(each)),
        )
        .join(" & ") + " \\\\",
  );
  return [
    "% needs \\usepackage{booktabs}",
    `\\begin{tabular}{l${"r".repeat(table.columns.length - 1)}}`,
    "\\toprule",
    table.columns.map((column) => cell(column.name)).join(" & ") + " \\\\",
    "\\midrule",
    ...body,
    "\\bottomrule",
    "\\end{tabular}",
    "",
  ].join("\n");
}
