"use strict";
// The head of a live page: what is done, running and to come; and the documents that come while it is open.

/** The part of the page about what goes on: {state, element, update}. */
function drawLive(live) {
  const state = make("span", {class: "pulse"}, "live");
  const tiles = make("div", {class: "tiles"});
  const notes = make("div", {"aria-live": "polite"});
  const bar = make("progress", {"aria-label": "Rounds done of all runs"});
  const table = plainTable(live.table);
  const update = (next) => {
    const [done, asked] = next.rounds;
    const counted = Object.entries(next.counts).map(([name, count]) =>
      tile(name, String(count), `state ${name.replace(/\W/g, "-")}`),
    );
    bar.hidden = !asked; // nothing has begun
    bar.max = Math.max(asked, 1);
    bar.value = done;
    tiles.replaceChildren(
      ...counted,
      ...(asked ? [tile("rounds", `${done.toLocaleString("en")} of ${asked.toLocaleString("en")}`)] : []),
      ...(next.left ? [tile("time left", `about ${next.left}`)] : []),
      ...next.gpus.map((gpu, k) =>
        tile(
          `GPU ${k}: ${gpu.name}`,
          `${shown(gpu.used, "bytes")} of ${shown(gpu.total, "bytes")}`,
          "",
          `${gpu.busy} % busy`,
        ),
      ),
    );
    const texts = next.notes.map((text) => make("p", {class: "note"}, text));
    if (notes.textContent !== texts.map((each) => each.textContent).join("")) notes.replaceChildren(...texts);
    table.update(next.table);
  };
  update(live);
  const title = make("h2", {id: "live"}, "Progress");
  return {state, element: make("section", {"aria-labelledby": "live"}, title, tiles, bar, notes, table.element), update};
}

/** Give the report every new document, and say when there is no connection. */
function follow(report) {
  const source = new EventSource("events");
  const pulse = document.querySelector(".pulse");
  const tell = (text, kind) => {
    pulse.textContent = text;
    pulse.className = `pulse ${kind}`;
    if (kind) pulse.setAttribute("role", "alert");
    else pulse.removeAttribute("role"); // the time of every document is not read out
  };
  source.onopen = () => tell("live", "");
  source.onerror = () => tell("no connection; trying again", "lost");
  source.onmessage = (event) => {
    report.update(JSON.parse(event.data));
    tell(`live, ${new Date().toLocaleTimeString("en-GB")}`, "");
  };
}
