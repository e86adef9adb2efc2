"use strict";
// The page: every section of the document, its view kept in the address after #.

function drawReport(host, content) {
  const sections = content.sections;
  const many = sections.length > 1;
  const places = sections.map((section, number) => make("section", {"aria-labelledby": `section-${number}`}));
  const link = make(
    "button",
    {type: "button", class: "small", onclick: () => copy(location.href, link)},
    "Copy link to this view",
  );
  const menu = make(
    "nav",
    {"aria-label": "Sections"},
    sections.map((section, number) =>
      make(
        "a",
        {
          href: `#at=${number}`,
          onclick: (event) => {
            event.preventDefault();
            go(number);
          },
        },
        section.title,
      ),
    ),
  );
  const go = (number) => {
    at = number;
    keep();
    places[number].querySelector("h2").focus();
    places[number].scrollIntoView();
  };
  host.replaceChildren(
    make(
      "header",
      {},
      make("div", {class: "bar"}, make("span", {class: "brand"}, "undrift report"), link),
      make("h1", {}, content.title),
      make("p", {class: "faint"}, content.facts),
      content.notes.map((note) => make("p", {class: "note"}, note)),
    ),
    ...(many ? [menu] : []),
    ...content.tables.map((table) => plainTable(table)),
    ...places,
    ...(content.cite.length ? [citation(content.cite)] : []),
    make(
      "details",
      {class: "fold"},
      make("summary", {}, "Versions and machine"),
      Object.keys(content.made).length
        ? pairs(content.made)
        : make("p", {}, "The runs do not say which versions made them."),
    ),
    make("footer", {}, make("p", {}, "Made by undrift; charts by uPlot (MIT licence). This file needs no network.")),
  );

  let at = null; // the section that was gone to
  let views = [];
  let drawn = [];
  const keep = () => {
    const entries = sections.flatMap((section, number) =>
      viewEntries(section, views[number]).map(([name, value]) => [`${number}.${name}`, value]),
    );
    if (at !== null) entries.push(["at", at]);
    const text = new URLSearchParams(entries).toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };
  const draw = () => {
    const entries = new URLSearchParams(location.hash.slice(1));
    views = sections.map((section, number) => {
      const own = [...entries]
        .filter(([name]) => name.startsWith(`${number}.`))
        .map(([name, value]) => [name.slice(name.indexOf(".") + 1), value]);
      return viewFrom(section, new Map(own));
    });
    drawn = sections.map((section, number) => drawSection(places[number], section, number, !many, views[number], keep));
    const to = Number(entries.get("at"));
    if (entries.has("at") && places[to]) {
      at = to;
      places[to].scrollIntoView();
    }
  };
  draw();
  window.addEventListener("hashchange", draw);
  const redraw = () => drawn.forEach((section) => section.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white: charts are drawn anew in the light colours.
  const paper = (on) => () => {
    document.documentElement.classList.toggle("paper", on);
    redraw();
  };
  window.addEventListener("beforeprint", paper(true));
  window.addEventListener("afterprint", paper(false));
}

/** BibTeX of the methods that were used. */
function citation(entries) {
  const text = entries.join("\n\n") + "\n";
  const button = make("button", {type: "button", class: "small", onclick: () => copy(text, button)}, "Copy");
  return make(
    "details",
    {class: "fold"},
    make("summary", {}, "Papers behind these methods (BibTeX)"),
    make("div", {class: "bar"}, button, savers("the BibTeX entries", {BibTeX: () => download("papers", "bib", text)})),
    make("pre", {tabindex: "0"}, text),
  );
}

/** Copy text, and say so on the button; where the clipboard is closed, the text is offered to be copied by hand. */
function copy(text, button) {
  const before = button.textContent;
  const say = (words) => {
    button.textContent = words;
    setTimeout(() => {
      button.textContent = before;
    }, 1500);
  };
  if (!navigator.clipboard) {
    window.prompt("Copy this", text);
    return;
  }
  navigator.clipboard.writeText(text).then(
    () => say("Copied"),
    () => window.prompt("Copy this", text),
  );
}

drawReport(document.getElementById("report"), JSON.parse(document.getElementById("document").textContent));
