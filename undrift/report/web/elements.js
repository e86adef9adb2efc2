"use strict";
// Elements, numbers as text, and files to download.

/** make("p", {class: "faint", onclick: f}, "text", child): text stays text, it never becomes markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** A colour of the style sheet, such as "ink", of the present light or dark theme. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// After the last colour comes the next pattern of dashes.
const COLOURS = 8;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const lineColour = (place) => colour(`line-${place % COLOURS}`);
const lineDash = (place) => DASHES[Math.floor(place / COLOURS) % DASHES.length];

/** A short piece of a line, as in the chart. */
function swatch(place) {
  const mark = make("span", {class: "swatch", "aria-hidden": "true"});
  const style = place < COLOURS ? "solid" : lineDash(place)[0] > 2 ? "dashed" : "dotted";
  mark.style.borderTop = `3px ${style} var(--line-${place % COLOURS})`;
  return mark;
}

/** A number in four digits; bytes in their unit. */
function shown(value, unit = "") {
  if (value == null || Number.isNaN(value)) return "–";
  if (unit === "bytes") {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let place = 0;
    while (Math.abs(value) >= 1000 && place < units.length - 1) [value, place] = [value / 1000, place + 1];
    return `${Number(value.toPrecision(4))} ${units[place]}`;
  }
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

/** Offer a file under a name that any file system takes. */
function download(name, ending, content) {
  const blob = content instanceof Blob ? content : new Blob([content], {type: "text/plain;charset=utf-8"});
  const link = make("a", {
    href: URL.createObjectURL(blob),
    download: `${name
      .toLowerCase()
      .replace(/[^a-z0-9]+/g, "-")
      .replace(/^-|-$/g, "")
      .slice(0, 80)}.${ending}`,
  });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** Buttons for the forms in which something can be saved: {CSV: function}. */
function savers(what, forms) {
  const buttons = Object.entries(forms).map(([form, save]) =>
    make("button", {type: "button", class: "small", "aria-label": `Save ${what} as ${form}`, onclick: save}, form),
  );
  return make("span", {class: "savers"}, buttons);
}

/** A labelled choice: options are [value, text]. */
function chooser(label, options, value, onchange) {
  const choice = make(
    "select",
    {onchange: () => onchange(choice.value)},
    options.map(([key, text]) => make("option", {value: key, selected: String(key) === String(value)}, text)),
  );
  return make("label", {}, make("span", {}, label), choice);
}

function checkbox(label, checked, onchange) {
  const box = make("input", {type: "checkbox", checked, onchange: () => onchange(box.checked)});
  return make("label", {class: "check"}, box, label);
}

/** A number with what it says below. */
function tile(name, value, kind = "", more = "") {
  return make(
    "div",
    {class: "tile"},
    make("b", {}, value),
    make("span", {class: kind}, name),
    more ? make("span", {}, more) : null,
  );
}
