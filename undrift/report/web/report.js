"use strict";
// The page: every section of the document, its view kept in the address after #.

/** Draw the document into `host`. Returns {update}: update(next) shows a document that has grown. */
function drawReport(host, content) {
  let at = null; // the section that was gone to
  let views = [];
  let drawn = [];
  let tables = []; // over several sections
  let places = [];
  let panel = null; // of a live page

  const keep = () => {
    const entries = content.sections.flatMap((section, number) =>
      viewEntries(section, views[number]).map(([name, value]) => [`${number}.${name}`, value]),
    );
    if (at !== null) entries.push(["at", at]);
    const text = new URLSearchParams(entries).toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  };
  const go = (number) => {
    at = number;
    keep();
    places[number].querySelector("h2").focus();
    places[number].scrollIntoView();
  };
  /** The frame of the page, with an empty place for each section. */
  const build = () => {
    const sections = content.sections;
    places = sections.map((section, number) => make("section", {"aria-labelledby": `section-${number}`}));
    tables = content.tables.map((table) => plainTable(table));
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
    if (content.live && !panel) panel = drawLive(content.live);
    const ground = content.live
      ? "This page is read-only and served to this machine only."
      : "This file needs no network.";
    host.replaceChildren(
      make(
        "header",
        {},
        make(
          "div",
          {class: "bar"},
          make("span", {class: "brand"}, content.live ? "undrift watch" : "undrift report"),
          panel ? panel.state : null,
          content.live ? null : link, // the address of a live page is a secret
        ),
        make("h1", {}, content.title),
        make("p", {class: "faint"}, content.facts),
        content.notes.map((note) => make("p", {class: "note"}, note)),
      ),
      ...(panel ? [panel.element] : []),
      ...(sections.length > 1 ? [menu] : []),
      ...tables.map((table) => table.element),
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
      make("footer", {}, make("p", {}, `Made by undrift; charts by uPlot (MIT licence). ${ground}`)),
    );
  };
  const draw = () => {
    const plain = content.live ? "Results so far" : "Results";
    drawn = content.sections.map((section, number) =>
      drawSection(places[number], section, number, content.sections.length > 1 ? section.title : plain, views[number], keep),
    );
  };
  const read = () => {
    const entries = new URLSearchParams(location.hash.slice(1));
    views = content.sections.map((section, number) => {
      const own = [...entries]
        .filter(([name]) => name.startsWith(`${number}.`))
        .map(([name, value]) => [name.slice(name.indexOf(".") + 1), value]);
      return viewFrom(section, new Map(own));
    });
    draw();
    const to = Number(entries.get("at"));
    if (entries.has("at") && places[to]) {
      at = to;
      places[to].scrollIntoView();
    }
  };
  build();
  read();
  window.addEventListener("hashchange", read);
  const redraw = () => drawn.forEach((section) => section.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // Paper is white: charts are drawn anew in the light colours.
  const paper = (on) => () => {
    document.documentElement.classList.toggle("paper", on);
    redraw();
  };
  window.addEventListener("beforeprint", paper(true));
  window.addEventListener("afterprint", paper(false));

  /** Numbers are put in place where that is all that is new; else the page is drawn again, with what the reader chose. */
  const update = (next) => {
    const before = content;
    document.title = `undrift: ${next.title}`;
    const same = frameOf(before) === frameOf(next);
    const alike = same && before.sections.every((section, k) => shapeOf(section) === shapeOf(next.sections[k]));
    undisturbed(host, () => {
      if (panel) panel.update(next.live);
      if (alike) {
        content = {...next, sections: before.sections}; // which the parts of the page hold, and now fill anew
        tables.forEach((table, k) => table.update(next.tables[k]));
        drawn.forEach((section, k) => section.update(next.sections[k]));
        return;
      }
      const old = new Map(before.sections.map((section, k) => [section.title, [section, views[k]]]));
      drawn.forEach((section) => section.destroy());
      content = next;
      views = next.sections.map((section) =>
        old.has(section.title) ? carriedView(...old.get(section.title), section) : firstView(section),
      );
      at = null;
      build();
      draw();
      keep();
    });
  };
  return {update};
}

/** What the frame of the page shows. */
const frameOf = (content) =>
  JSON.stringify([
    [content.title, content.facts, content.notes, content.cite, content.made],
    content.tables.map((table) => table.title),
    content.sections.map((section) => section.title),
  ]);

/** Change what is in `host` without moving the reader: the focus, open folds and places in scrolled tables stay. */
function undisturbed(host, change) {
  const parts = (kind) => [...host.querySelectorAll(kind)];
  const reachable = "a, button, input, select, summary, [tabindex]";
  const nameOf = (element) => `${element.tagName} ${element.getAttribute("aria-label") || element.textContent}`;
  const focused = parts(reachable).indexOf(document.activeElement);
  const name = focused < 0 ? "" : nameOf(document.activeElement);
  const within = (element) => `${element.closest("section")?.getAttribute("aria-labelledby")} ${nameOf(element)}`;
  const open = new Set(parts("details[open] > summary").map(within));
  const scrolled = new Map(parts(".wide").map((each) => [within(each), [each.scrollLeft, each.scrollTop]]));
  const [x, y] = [window.scrollX, window.scrollY];
  change();
  for (const summary of parts("details > summary"))
    if (open.has(within(summary))) summary.parentElement.open = true;
  for (const each of parts(".wide")) [each.scrollLeft, each.scrollTop] = scrolled.get(within(each)) || [0, 0];
  if (focused >= 0 && !host.contains(document.activeElement)) {
    const now = parts(reachable);
    const same = nameOf(now[focused] || host) === name ? now[focused] : now.find((each) => nameOf(each) === name);
    if (same) same.focus({preventScroll: true});
  }
  if (window.scrollY !== y) window.scrollTo(x, y);
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

const content = JSON.parse(document.getElementById("document").textContent);
const report = drawReport(document.getElementById("report"), content);
if (content.live) follow(report);
