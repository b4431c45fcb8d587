"use strict";
// The page of radixkv's cache. Texts of the server go into the document as text nodes only, never as HTML.

const ROW = 22; // height of a row of the tree, in px
const MAX_ROWS = 40;
const HISTORY_S = 600;
const RATE_S = 10; // rates are means of so many seconds
const DOCTOR_MS = 5000;
const RETRY_MS = 2000;
const SILENT_MS = 5000; // the server sends once a second; after so long without a word the numbers are old
const SALT_COLOURS = 7; // the eighth colour is for all others

const at = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const pagesOf = (n) => `${number.format(n)} page${n === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part < whole && part > 0 ? 1 : 0)}%` : "–");

/** Makes an element; strings among the children become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element[name] = value;
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---------------------------------------------------------------- the server

class NeedsKey extends Error {}

/** Fetches a path of this server with the key of this tab. Throws an Error with the server's text. */
async function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem("radixkv-key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.ok) return reply;
  const text = await reply.json().then((body) => body.error.message, () => `the server answered ${reply.status}`);
  const needsKey = reply.status === 401 || (key && reply.status === 403); // 403: a key, but not the operator's
  throw needsKey ? new NeedsKey(key ? text : "") : new Error(text);
}

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return (await request(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

/** Yields the data of server-sent events. EventSource cannot send the key in a header. */
async function* events(path, signal) {
  const reader = (await request(path, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}

// ---------------------------------------------------------------- the stream

let stream = null; // AbortController of the open stream
let latest = null;
let heardAt = 0;
const history = [];

/** Shows how the page stands with the server. Numbers fade unless they are live. */
function setState(text, kind = "") {
  const since = latest && kind === "lost" ? `; numbers of ${new Date(1000 * latest.time).toLocaleTimeString("en-GB")}` : "";
  at("state").textContent = text + since;
  at("state").className = kind;
  at("main").classList.toggle("stale", kind !== "live");
}

function noticeSilence() {
  const isSilent = stream && latest && at("state").className === "live" && performance.now() - heardAt > SILENT_MS;
  if (isSilent) setState("the server is silent", "lost");
}

/** Follows the stream while the page can be seen; a hidden page costs the server nothing. */
async function follow() {
  if (stream) return;
  const mine = (stream = new AbortController());
  while (stream === mine) {
    try {
      for await (const event of events("cache/tree/events", mine.signal)) {
        if (event.error) throw new Error(event.error.message);
        if (event.type === "restarting") setState(event.message, "lost");
        else show(event);
      }
      setState("the server closed the stream; trying again", "lost");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof NeedsKey) return askForKey(error.message);
      setState(`no connection: ${error.message}; trying again`, "lost");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function stop() {
  stream?.abort();
  stream = null;
}

function askForKey(text) {
  stop();
  at("main").hidden = true;
  at("key-form").hidden = false;
  at("key-error").textContent = text;
  setState("needs a key");
  at("key").focus();
}

function show(snapshot) {
  latest = snapshot;
  heardAt = performance.now();
  history.push({ ...snapshot, tiers: sizes(snapshot.tiers) });
  while (history[0].time < snapshot.time - HISTORY_S) history.shift();
  at("key-form").hidden = true;
  if (at("main").hidden) {
    at("main").hidden = false;
    showDoctor();
  }
  at("model").textContent = snapshot.model;
  setState("live", "live");
  at("no-contents").hidden = snapshot.has_contents;
  showTiles(snapshot);
  showPauses(snapshot.pauses);
  showTree();
  showCharts();
}

/** Returns the numbers of the tiers without their nodes, of which the history keeps none. */
function sizes(tiers) {
  return Object.fromEntries(Object.entries(tiers).map(([name, { nodes, ...rest }]) => [name, rest]));
}

// ---------------------------------------------------------------- numbers

/** Returns what a counter grew by, per second and in all, in the last RATE_S before a place in the history. */
function growth(name, end = history.length - 1) {
  let start = end;
  const isOlder = (at) => history[at - 1].totals.prefix_queries <= history[at].totals.prefix_queries; // no restart
  while (start > 0 && history[end].time - history[start].time < RATE_S && isOlder(start)) start--;
  const grown = history[end].totals[name] - history[start].totals[name];
  const seconds = history[end].time - history[start].time;
  return { grown, perSecond: seconds > 0 && grown >= 0 ? grown / seconds : 0 };
}

/** Returns a counter's part of another in the last RATE_S before a place in the history; null if there was nothing. */
function share(part, whole, end) {
  const grown = growth(whole, end).grown;
  return grown > 0 ? growth(part, end).grown / grown : null;
}

const hitRate = (end) => share("prefix_hits", "prefix_queries", end);

function showTiles({ load, totals, tiers }) {
  const { device, host, storage } = tiers;
  const shares = (name, part, whole) => {
    const recent = share(part, whole);
    return [`${name}, last 10 s`, recent === null ? "–" : percent(recent, 1), `${percent(totals[part], totals[whole])} since start`];
  };
  const tiles = [
    shares("Hit rate", "prefix_hits", "prefix_queries"),
    ...("draft_tokens" in totals ? [shares("Drafts accepted", "accepted_tokens", "draft_tokens")] : []),
    ["Running", number.format(load.running), `of at most ${number.format(load.max_running)}`],
    ["Waiting", number.format(load.waiting), `${number.format(totals.preemptions)} preemptions`],
    ["Answers, tokens/s", number.format(Math.round(growth("generation_tokens").perSecond)), `${number.format(totals.generation_tokens)} in all`],
    ["Pool in use", percent(device.capacity - device.free - device.evictable, device.capacity), `${number.format(device.capacity)} pages`],
    ["Pool cached", percent(device.evictable, device.capacity), device.pinned ? `${number.format(device.pinned)} pages pinned` : `${number.format(totals.pages_evicted)} pages evicted`],
  ];
  if (device.states) {
    const { capacity, free } = device.states;
    const note = `${number.format(totals.state_hits)} hits, ${number.format(totals.states_evicted)} evicted`;
    tiles.push(["States kept", capacity ? percent(capacity - free, capacity) : "none", `${number.format(capacity)} slots; ${note}`]);
  }
  if (host) tiles.push(["Host tier filled", percent(host.capacity - host.free, host.capacity), `${number.format(host.capacity)} pages`]);
  if (storage) tiles.push(["Storage tier", `${number.format(storage.pages)}`, `pages, ${(storage.bytes / 2 ** 30).toFixed(1)} GiB`]);
  at("tiles").replaceChildren(...tiles.map(([name, value, note]) =>
    make("div", { className: "tile" }, make("dt", {}, name), make("dd", {}, value), make("dd", { className: "note" }, note))));
}

// ---------------------------------------------------------------- the tree

let zoomed = ""; // key of the run that has the whole width
let selected = "";

/** Returns the cache as one tree of blocks with key, name, tiers, pages and children. */
function blocks(snapshot) {
  const found = snapshot.joint ?? snapshot.tiers.device;
  const top = { key: "", kind: "all", name: "Everything cached", pages: found.pages, children: [] };
  const made = found.nodes.map((node) => ({ key: `${node.id}`, kind: "run", tiers: ["device"], ...node, children: [] }));
  for (const block of made) {
    const above = block.parent < 0 ? top : made[block.parent];
    block.salt = block.parent < 0 ? block.namespace : above.salt;
    if (block.parent < 0) block.kind = "root";
    block.name = nameOf(block);
    block.parent = above;
    above.children.push(block);
  }
  for (const block of made) addMore(block, block.more, block.more_pages);
  addMore(top, found.more, found.more_pages);
  if (found.pages_not_visited > 0) addMore(top, 0, found.pages_not_visited);
  const [only] = top.children;
  if (top.children.length === 1 && !only.salt && only.replica === undefined) { // without salts there is nothing to tell the root from the whole
    top.children = only.children;
    top.children.forEach((block) => (block.parent = top));
  }
  (function order(block) {
    block.children.sort((a, b) => (a.kind === "more") - (b.kind === "more") || a.replica - b.replica || a.id - b.id); // blocks stay where they are
    block.children.forEach(order);
  })(top);
  return top;
}

function addMore(parent, nodes, pages) {
  if (!pages) return;
  const name = nodes ? `${number.format(nodes)} more` : `${pagesOf(pages)} not looked at`;
  parent.children.push({ key: `${parent.key}+${nodes ? "more" : "rest"}`, kind: "more", id: 0, tiers: [], salt: parent.salt, name, pages, children: [], parent });
}

function nameOf(block) {
  if (block.kind === "root") return (block.replica === undefined ? "" : `replica ${block.replica}, `) + (block.salt ? `salt ${block.salt}` : "no salt");
  if (typeof block.starts_with === "string") {
    const text = block.starts_with.replace(/\s+/g, " ");
    return text.replace(/^(<\|?\w{1,24}\|?>)+/, "") || text; // without the mark that begins every text
  }
  return pagesOf(block.own_pages);
}

function find(block, key) {
  if (block.key === key) return block;
  for (const child of block.children) {
    const found = find(child, key);
    if (found) return found;
  }
  return null;
}

const HEATS = [
  ["in-use", "in use now"],
  ["heat-1", "used in the last 10 s"],
  ["heat-2", "last minute"],
  ["heat-3", "last 10 min"],
  ["heat-4", "longer ago"],
  ["demoted", "next to be evicted"],
];

function heat(block) {
  if (block.kind !== "run") return "more";
  if (block.leases) return "in-use";
  const idle = block.idle_seconds;
  if (idle === undefined) return "demoted";
  return `heat-${idle <= 10 ? 1 : idle <= 60 ? 2 : idle <= 600 ? 3 : 4}`;
}

const TIERS = [["s1", "device only"], ["s3", "device and host"], ["s2", "host only"]];
const TIER_COLOURS = { device: "s1", "device,host": "s3", host: "s2" }; // by the tiers, joined as a key is

/** Returns a function from blocks to names of colours, and the legend. */
function colouring(top) {
  const kind = at("colouring").value;
  if (kind === "heat") return [heat, HEATS];
  if (kind === "tier") return [({ kind, tiers }) => (kind === "run" ? TIER_COLOURS[tiers] : "more"), TIERS];
  const pages = new Map();
  for (const child of top.children) if (child.salt !== undefined) pages.set(child.salt, (pages.get(child.salt) ?? 0) + child.pages);
  const salts = [...pages.keys()].sort((a, b) => pages.get(b) - pages.get(a) || (a < b ? -1 : 1));
  const place = new Map(salts.map((salt, index) => [salt, `s${Math.min(index, SALT_COLOURS) + 1}`]));
  const legend = salts.slice(0, SALT_COLOURS).map((salt) => [place.get(salt), salt ? `salt ${salt}` : "no salt"]);
  if (salts.length > SALT_COLOURS) legend.push([`s${SALT_COLOURS + 1}`, `${salts.length - SALT_COLOURS} other salts`]);
  return [({ kind, salt }) => (kind === "run" || kind === "root" ? place.get(salt) : "more"), legend];
}

function showTree() {
  const top = blocks(latest);
  const focus = find(top, zoomed) ?? top;
  if (focus === top) zoomed = "";
  const hasHost = Boolean(latest.joint);
  for (const option of at("colouring").options) if (option.value === "tier") option.hidden = !hasHost;
  const [colour, legend] = colouring(top);
  const marks = hasHost && at("colouring").value !== "tier" ? TIERS : [];
  at("legend").replaceChildren(...[...legend, ...marks].map(([name, text], index) => {
    const swatch = make("span", { className: index < legend.length ? "swatch" : "swatch mark" });
    swatch.style.background = `var(--${name})`;
    return make("span", {}, swatch, text);
  }));
  showPath(focus);
  const width = at("icicle").clientWidth;
  const drawn = [];
  let nRows = 0;
  (function place(block, x, share, row) {
    if (share < 1 || row >= MAX_ROWS) return;
    nRows = Math.max(nRows, row + 1);
    if (block !== top) drawn.push({ block, group: bar(block, x, share, row, colour(block), marks.length > 0) });
    for (const child of block.children) {
      const part = block.pages ? (share * child.pages) / block.pages : 0;
      place(child, x, part, block === top ? row : row + 1);
      x += part;
    }
  })(focus, 0, width, 0);
  const chosen = drawn.find(({ block }) => block.key === selected) ?? drawn[0]; // the one that Tab reaches
  chosen?.group.setAttribute("tabindex", 0);
  const hadFocus = at("icicle").contains(document.activeElement);
  const svg = makeSvg("svg", { width, height: nRows * ROW, role: "group", "aria-label": "The tree as bars" }, ...drawn.map(({ group }) => group));
  at("icicle").replaceChildren(svg);
  if (hadFocus) chosen?.group.focus({ preventScroll: true });
  if (!top.pages) at("icicle").replaceChildren(make("p", { className: "soft" }, "The cache is empty: no request has filled a page yet."));
  showDetail(find(top, selected) ?? focus);
  showLargest(top, hasHost);
}

function bar(block, x, width, row, colour, hasMark) {
  const rect = makeSvg("rect", { x, y: row * ROW, width, height: ROW, rx: 2 });
  rect.style.fill = `var(--${colour})`;
  const isSelected = block.key === selected;
  const group = makeSvg("g", { class: `${width < 4 ? "thin" : ""} ${isSelected ? "selected" : ""}`, role: "button", tabindex: -1, "aria-pressed": isSelected, "aria-label": describe(block) },
    makeSvg("title", {}, describe(block)), rect);
  if (hasMark && block.kind === "run") {
    const mark = makeSvg("rect", { class: "mark", x: x + 1, y: row * ROW + ROW - 4, width: Math.max(1, width - 2), height: 3 });
    mark.style.fill = `var(--${TIER_COLOURS[block.tiers]})`;
    group.append(mark);
  }
  const room = Math.floor((width - 8) / 6.2);
  if (room >= 3) {
    const name = block.name.length > room ? `${block.name.slice(0, room - 1)}…` : block.name;
    const text = makeSvg("text", { x: x + 4, y: row * ROW + (hasMark ? 13 : 15) }, name);
    text.style.fill = `var(--${colour}-ink)`;
    group.append(text);
  }
  group.addEventListener("click", () => (block.key === zoomed ? zoom(block.parent.key, block.key) : zoom(block.kind === "more" ? block.parent.key : block.key, block.key)));
  group.addEventListener("keydown", (event) => moveBy(event, block));
  return group;
}

/** Moves the selection with the arrow keys; Enter and the space bar zoom in or out, Escape shows everything. */
function moveBy(event, block) {
  const siblings = block.parent.children, place = siblings.indexOf(block);
  const isTop = block.key === zoomed || block.parent.kind === "all";
  const targets = { ArrowDown: block.children[0], ArrowUp: isTop ? undefined : block.parent, ArrowLeft: block.key === zoomed ? undefined : siblings[place - 1], ArrowRight: block.key === zoomed ? undefined : siblings[place + 1] };
  if (event.key === "Enter" || event.key === " ") event.currentTarget.dispatchEvent(new MouseEvent("click"));
  else if (event.key === "Escape") zoom("", selected);
  else if (!(event.key in targets)) return;
  else if (targets[event.key]) zoom(zoomed, targets[event.key].key);
  event.preventDefault();
}

function zoom(key, select = key) {
  zoomed = key;
  selected = select;
  showTree();
}

function showPath(focus) {
  const parts = [];
  for (let block = focus; block; block = block.parent) {
    const { key, name } = block;
    parts.unshift(block === focus ? make("b", { title: name }, name) : make("button", { type: "button", title: name, onclick: () => zoom(key) }, name));
  }
  at("path").replaceChildren(...parts.flatMap((part, index) => (index ? [make("span", { className: "soft" }, "›"), part] : [part])));
}

function ago(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= length) return `${Math.floor(seconds / length)} ${unit} ago`;
  return `${Math.floor(seconds)} s ago`;
}

function lastUse(block) {
  if (block.leases) return `in use by ${number.format(block.leases)}`;
  return block.idle_seconds === undefined ? "next to be evicted" : ago(block.idle_seconds);
}

/** Returns what there is to say of a block, in one line. */
function describe(block) {
  const parts = [pagesOf(block.pages), `${number.format(block.pages * latest.page_size)} tokens`];
  if (block.kind === "run") {
    parts[0] += ` in and below, ${number.format(block.own_pages)} of them its own`;
    if (latest.joint) parts.push(`in ${block.tiers.join(" and ")}`);
    parts.push(/^in use|^next/.test(lastUse(block)) ? lastUse(block) : `last used ${lastUse(block)}`);
    if (block.hits) parts.push(`${number.format(block.hits)} hits`);
    if (block.is_pinned) parts.push("pinned");
    if (block.has_state) parts.push("a state is kept at its end");
    if (block.salt) parts.push(`salt ${block.salt}`);
  }
  if (block.kind === "more") parts.push("too small, too many or too deep to be drawn one by one");
  return parts.join(" · ");
}

function showDetail(block) {
  at("detail").replaceChildren(make("code", {}, block.kind === "run" && block.starts_with ? String(block.starts_with) : block.name), make("br"), describe(block));
}

/** Fills the table of the largest runs, with the columns that have something to say. */
function showLargest(top, hasHost) {
  const runs = [];
  (function collect(block) {
    if (block.kind === "run") runs.push(block);
    block.children.forEach(collect);
  })(top);
  const columns = [
    ["Run", (run) => make("button", { type: "button", onclick: () => zoom(run.key) }, run.name), true],
    ["Tiers", (run) => run.tiers.join(", "), hasHost],
    ["Pages", (run) => number.format(run.pages), true, "number"],
    ["Own", (run) => number.format(run.own_pages), true, "number"],
    ["Last use", lastUse, true],
    ["Hits", (run) => number.format(run.hits ?? 0), runs.some((run) => run.hits), "number"],
    ["cache_salt", (run) => run.salt || "none", runs.some((run) => run.salt)],
  ].filter(([, , isShown]) => isShown);
  runs.sort((a, b) => b.pages - a.pages);
  const focused = [...at("largest").querySelectorAll("button")].indexOf(document.activeElement);
  at("largest").tHead.replaceChildren(make("tr", {}, ...columns.map(([name, , , className = ""]) => make("th", { className }, name))));
  at("largest").tBodies[0].replaceChildren(...runs.slice(0, 16).map((run) =>
    make("tr", {}, ...columns.map(([, value, , className = ""]) => make("td", { className }, value(run))))));
  at("largest").querySelectorAll("button")[focused]?.focus({ preventScroll: true });
}

// ---------------------------------------------------------------- pauses

/** Shows how long tools and users take between turns; nothing before the first chat has paused. */
function showPauses(pauses) {
  at("pauses").hidden = !pauses || pauses.open + pauses.returns + pauses.given_up === 0;
  if (at("pauses").hidden) return;
  at("pauses-summary").textContent = pauses.text;
  at("pauses-kinds").replaceChildren(...pauses.kinds.map((kind) => make("li", {}, kind.text)));
}

// ---------------------------------------------------------------- charts

function showCharts() {
  const device = (point) => point.tiers.device;
  const charts = [
    ["Pool, pages", [["in use", "s2", (p) => device(p).capacity - device(p).free - device(p).evictable], ["cached", "s1", (p) => device(p).evictable]], device(latest).capacity, true],
    ["Hit rate, last 10 s", [["of prompt tokens", "s3", (_, index) => hitRate(index)]], 1, false],
    ["Requests", [["running", "s1", (p) => p.load.running], ["waiting", "s2", (p) => p.load.waiting]], 0, false],
  ];
  if (latest.tiers.host) charts.splice(1, 0, ["Host tier, pages", [["filled", "s1", (p) => (p.tiers.host?.capacity ?? 0) - (p.tiers.host?.free ?? 0)]], latest.tiers.host.capacity, true]);
  if (latest.tiers.storage) charts.splice(2, 0, ["Storage tier, pages", [["filled", "s1", (p) => p.tiers.storage?.pages ?? 0]], 0, true]);
  at("charts").replaceChildren(...charts.map(([title, series, top, stacked]) => chart(title, series, top, stacked)));
}

/** Draws series over the time of the history; `stacked` ones as areas on each other. `top` 0: the largest value. */
function chart(title, series, top, stacked) {
  const caption = make("figcaption", {}, make("b", {}, title));
  for (const [name, colour] of series) {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = `var(--${colour})`;
    caption.append(make("span", {}, swatch, name));
  }
  const figure = make("figure", {}, caption);
  const columns = getComputedStyle(at("charts")).gridTemplateColumns.split(" ");
  const width = Math.max(120, Math.floor(parseFloat(columns[0])) || 280), height = 110, base = height - 14;
  const end = latest.time, span = Math.max(60, end - history[0].time);
  const x = (point) => width - ((end - point.time) / span) * width;
  const lower = history.map(() => 0);
  const values = series.map(([, , of]) => history.map((point, index) => of(point, index)));
  const totals = history.map((_, index) => values.reduce((sum, of) => (stacked ? sum + of[index] : Math.max(sum, of[index] ?? 0)), 0));
  const most = top || Math.max(4, ...totals);
  const y = (value) => base - (value / most) * (base - 14);
  const svg = makeSvg("svg", { width, height, role: "img", "aria-label": title },
    makeSvg("line", { class: "axis", x1: 0, x2: width, y1: base, y2: base }),
    makeSvg("line", { class: "axis", x1: 0, x2: width, y1: y(most), y2: y(most) }));
  series.forEach(([, colour], index) => {
    for (const run of runsOf(values[index])) {
      const points = run.map((i) => [x(history[i]), y((stacked ? lower[i] : 0) + values[index][i])]);
      if (points.length === 1) points.unshift([points[0][0] - 2, points[0][1]]);
      const line = points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join(" ");
      if (stacked) {
        const back = run.map((i) => `${x(history[i]).toFixed(1)},${y(lower[i]).toFixed(1)}`).reverse().join(" ");
        const area = makeSvg("polygon", { points: `${line} ${back}`, opacity: 0.75 });
        area.style.fill = `var(--${colour})`;
        svg.append(area);
      } else {
        const path = makeSvg("polyline", { points: line, "stroke-width": 2, fill: "none" });
        path.style.stroke = `var(--${colour})`;
        svg.append(path);
      }
    }
    if (stacked) history.forEach((_, i) => (lower[i] += values[index][i]));
  });
  svg.append(
    makeSvg("text", { class: "label", x: 0, y: 10 }, top === 1 ? "100%" : number.format(most)),
    makeSvg("text", { class: "label", x: 0, y: height - 2 }, `${Math.round(span)} s ago`),
    makeSvg("text", { class: "label", x: width, y: height - 2, "text-anchor": "end" }, "now"));
  figure.append(svg);
  return figure;
}

/** Splits the places of a list into runs without null. */
function runsOf(values) {
  const runs = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (index && values[index - 1] !== null && runs.length) runs.at(-1).push(index);
    else runs.push([index]);
  });
  return runs;
}

// ---------------------------------------------------------------- start

at("explain-form").addEventListener("submit", submitExplain);
at("colouring").addEventListener("change", showTree);
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("radixkv-key", at("key").value.trim());
  at("key").value = "";
  follow();
});
document.addEventListener("visibilitychange", () => (document.hidden ? (stop(), setState("paused")) : follow()));
new ResizeObserver(() => latest && (showTree(), showCharts())).observe(at("icicle"));
at("tables").addEventListener("toggle", showTables);
at("table-request").addEventListener("change", showTables);
setInterval(showDoctor, DOCTOR_MS);
setInterval(showTables, TABLES_MS);
setInterval(noticeSilence, 1000);
follow();
