// The live picture of a broker: asks /status.json each second and draws what it says. All text goes in as text.
"use strict";

const EVERY = 1000; // milliseconds
const COLUMN = 210, ROW = 74, WIDTH = 160, HEIGHT = 46;

function element(name, attributes = {}, ...children) {
  const space = "http://www.w3.org/2000/svg";
  const svg = ["svg", "g", "rect", "text", "path", "defs", "marker", "title"].includes(name);
  const made = svg ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const size = (bytes) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${unit === "B" ? bytes : bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
};
const span = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
const who = (session) => (session ? `${session.name} (${session.pid})` : "-");
const warmth = (share) => (share >= 0.99 ? "bad" : share >= 0.75 ? "warm" : "good");

const rateText = (thing) => (thing.rate === null ? "" : thing.rate.toFixed(1));

function fill(id, columns, rows, none) {
  const head = element("tr");
  for (const [title, , number] of columns) head.append(element("th", number ? { class: "number" } : {}, title));
  const body = rows.map((row) => {
    const line = element("tr");
    for (const [, cell, number] of columns) {
      const told = cell(row);
      const attributes = number ? { class: "number" } : told.state ? { class: told.state } : {};
      line.append(element("td", attributes, told.text ?? told));
    }
    return line;
  });
  if (!rows.length) body.push(element("tr", {}, element("td", { class: "empty", colspan: columns.length }, none)));
  document.getElementById(id).replaceChildren(head, ...body);
}

const state = (thing) =>
  thing.verdict !== null ? { text: `condemned from ${thing.verdict}`, state: "bad" }
    : thing.stream_ended ? { text: "ended" } : thing.named ? { text: "ok" } : { text: "unlinked" };

function full(channel) {
  const gauge = element("meter", { min: 0, max: 1, high: 0.75, optimum: 0, value: channel.occupancy });
  return element("span", {}, gauge, ` ${Math.round(channel.occupancy * channel.depth)}/${channel.depth}`);
}

function tables(seen) {
  const name = ["name", (t) => t.name], space = ["namespace", (t) => t.namespace], device = ["device", (t) => t.device];
  const perSecond = ["a second", rateText, true];
  fill("channels", [name, space, device, ["items", (t) => t.completed, true], perSecond, ["full", full],
    ["writer", (t) => who(t.recorder)],
    ["readers", (t) => t.readers.map((r) => `${r.reader ? r.reader.name : "?"}: ${r.held} held, ${r.behind} behind` +
      (r.skipped ? `, ${r.skipped} skipped` : "")).join("; ") || "-"],
    ["state", state]], seen.channels, "no channels");
  fill("sessions", [name, space, ["pid", (s) => s.pid, true],
    ["state", (s) => ({ text: s.process === "running" ? s.state : `${s.state}, ${s.process}`,
      state: s.state === "live" && s.process === "running" ? "good" : "bad" })],
    ["holds", (s) => s.attached, true], ["silent for", (s) => span(s.silent), true]], seen.sessions, "no sessions");
  fill("events", [name, space, device, ["issued", (t) => t.issued, true], ["completed", (t) => t.completed, true],
    perSecond, ["recorder", (t) => who(t.recorder)], ["state", state]], seen.events, "no events");
  fill("arrays", [name, space, device, ["bytes", (t) => size(t.bytes), true], ["version", (t) => t.completed, true],
    perSecond, ["writer", (t) => who(t.recorder)], ["readers", (t) => t.readers.length, true]], seen.arrays, "no arrays");
}

// Nodes are sessions (by name: replicas are one) and channels; a node stands one column behind the furthest before it.
function layout(channels, sessions) {
  const nodes = new Map(), arrows = [];
  const node = (key, label, kind, told) => {
    if (!nodes.has(key)) nodes.set(key, { key, label, kind, told: [], column: 0 });
    nodes.get(key).told.push(told);
    return key;
  };
  const session = (told, namespace) => {
    const found = sessions.find((s) => s.session === told.session);
    return node(`s ${namespace} ${told.name}`, told.name, "stage", found ?? told);
  };
  for (const channel of channels.filter((c) => c.named)) {
    const here = node(`c ${channel.namespace} ${channel.name}`, channel.name, "channel", channel);
    if (channel.recorder) arrows.push([session(channel.recorder, channel.namespace), here]);
    for (const reader of channel.readers) if (reader.reader) arrows.push([here, session(reader.reader, channel.namespace)]);
  }
  for (let turn = 0, moved = true; moved && turn < nodes.size; turn++) {
    moved = false;
    for (const [from, to] of arrows) {
      const wanted = nodes.get(from).column + 1;
      if (nodes.get(to).column < wanted && wanted < nodes.size) { nodes.get(to).column = wanted; moved = true; }
    }
  }
  const rows = new Map();
  for (const each of nodes.values()) {
    each.row = rows.get(each.column) ?? 0;
    rows.set(each.column, each.row + 1);
  }
  const seen = new Set();
  return { nodes, arrows: arrows.filter(([a, b]) => !seen.has(`${a}>${b}`) && seen.add(`${a}>${b}`)) };
}

function graph(seen) {
  const { nodes, arrows } = layout(seen.channels, seen.sessions);
  const svg = document.getElementById("graph");
  document.getElementById("no-graph").hidden = nodes.size > 0;
  const columns = Math.max(0, ...[...nodes.values()].map((n) => n.column + 1));
  const rows = Math.max(0, ...[...nodes.values()].map((n) => n.row + 1));
  svg.setAttribute("width", columns * COLUMN);
  svg.setAttribute("height", rows * ROW);
  const tip = element("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    element("path", { d: "M0 0L8 4L0 8z" }));
  const drawn = [element("defs", {}, tip)];
  const at = (node) => [node.column * COLUMN + 4, node.row * ROW + 8];
  for (const [from, to] of arrows) {
    const [x1, y1] = at(nodes.get(from)), [x2, y2] = at(nodes.get(to));
    const a = x1 + WIDTH, b = y1 + HEIGHT / 2, d = y2 + HEIGHT / 2, half = (x2 - a) / 2;
    drawn.push(element("path", { d: `M${a} ${b}C${a + half} ${b} ${x2 - half} ${d} ${x2} ${d}` }));
  }
  for (const node of nodes.values()) drawn.push(box(node, ...at(node)));
  svg.replaceChildren(...drawn);
}

function box(node, x, y) {
  const short = node.label.length > 20 ? `${node.label.slice(0, 19)}…` : node.label;
  const text = (dy, kind, said) => element("text", { x: x + 10, y: y + dy, class: kind }, said);
  if (node.kind === "stage") {
    const bad = node.told.some((s) => s.process && (s.process !== "running" || s.state !== "live"));
    const count = new Set(node.told.map((s) => s.session)).size;
    return element("g", {}, element("title", {}, node.label),
      element("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 8, class: bad ? "stage bad" : "stage" }),
      text(19, "", short), text(36, "small", bad ? "not well" : count > 1 ? `${count} replicas` : "running"));
  }
  const channel = node.told[0], perSecond = rateText(channel);
  return element("g", {}, element("title", {}, node.label),
    element("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 2, class: "channel" }),
    element("rect", { x, y: y + HEIGHT - 5, width: WIDTH * channel.occupancy, height: 5, class: `fill ${warmth(channel.occupancy)}` }),
    text(17, "", short), text(34, "small", `${perSecond ? `${perSecond} a second` : `${channel.completed} items`}`));
}

function show(seen) {
  const told = seen.broker;
  document.getElementById("broker").textContent = `broker ${told.pid}, version ${told.version}, up ${span(told.uptime)}, ` +
    `${told.sessions} sessions, ${size(told.bytes)} of memory, ${told.directory}`;
  tables(seen);
  graph(seen);
}

async function turn() {
  const trouble = document.getElementById("trouble");
  try {
    const answer = await fetch("status.json", { cache: "no-store" });
    const said = await answer.json();
    if (!answer.ok) throw new Error(said.why);
    show(said);
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = `No answer from the broker: ${error.message}`;
    trouble.hidden = false;
  }
  setTimeout(turn, EVERY);
}

turn();
