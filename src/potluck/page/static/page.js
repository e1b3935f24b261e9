"use strict";
// The page of a run. One stream of changes comes from the server; all that is shown is drawn from `state`.

const $ = (id) => document.getElementById(id);
const NAME = 0, DEVICE = 1, ROWS = 2, SHARE = 3, SPEED = 4, BUSY = 5, WAIT = 6, SEND = 7, LINK = 8, PHASE = 9, DOING = 10, HEARD = 11, WHY = 12, IN = 13, MACHINE = 14;
const X_ROWS = 0, X_TIME = 1, LOSS = 2, LEAST = 3, MOST = 4, LR = 5, NORM = 6, MOST_NORM = 7, FIRST = 8, LAST = 9;
const ROWS_SEEN = 0, SECONDS = 1, LOOKED = 2, STEP = 3, FIGURES = 4;
const PAGE_OF_ROWS = 25, MOST_STORY = 150, MOST_LINES = 200, PAGE_OF_CURVES = 12, PINNED = 3;
const GROUPS = { all: "All", workers: "Workers", saves: "Saves", run: "Run" };

const empty = () => ({ run: {}, head: {}, looks: [], points: [], span: 1, recipe: {} });
const fresh = () => ({ ...empty(), epochs: [], samples: [], lanes: [], laneNames: [], cells: [], workers: new Map(), story: [], output: [], can: {}, other: null });
let state = fresh();
let dirty = new Set(["all"]);
let shown = PAGE_OF_ROWS, curves = PAGE_OF_CURVES, byTime = false, group = "all", query = "", offset = 0, isHere = false, sinceHere = Date.now();

// Words

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "text") element.textContent = value;
    else if (name === "on") element.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}
function write(element, text) { if (element.textContent !== text) element.textContent = text; }
const whole = (number) => Math.round(number).toLocaleString("en");
function count(number) {
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(number) >= limit) return `${+(number / (suffix === "k" ? 1e3 : limit)).toPrecision(3)}${suffix}`;
  return Math.abs(number) >= 100 || Number.isInteger(number) ? whole(number) : `${+number.toPrecision(3)}`;
}
function bytes(number) {
  for (const [limit, suffix] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (number >= limit) return `${+(number / limit).toPrecision(3)} ${suffix}`;
  return `${Math.round(number)} B`;
}
function duration(seconds) {
  const all = Math.max(0, Math.round(seconds));
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 172800) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86400)} days ${Math.floor((all % 86400) / 3600)} h`;
}
const figure = (number) => number === null || number === undefined ? "–" : Math.abs(number) >= 1e-3 && Math.abs(number) < 1e5 ? number.toFixed(4) : number.toExponential(2);
const percent = (share) => share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`;
const plural = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;
const clock = (seconds, withSeconds = true) => new Date(1000 * seconds).toLocaleTimeString("en-GB", withSeconds ? undefined : { hour: "2-digit", minute: "2-digit" });
const now = () => Date.now() / 1000 + offset;
const isDark = matchMedia("(prefers-color-scheme: dark)");
const hue = (id) => (Number(id) * 137.508 + 212) % 360;
const colour = (id) => `hsl(${hue(id)} ${isDark.matches ? "58% 66%" : "52% 42%"})`;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What comes

function take(message) {
  offset = message.time - Date.now() / 1000;
  if (message.reset) { state = fresh(); dirty.add("all"); }
  for (const name of ["epochs", "samples", "can", "caught_up", "host_at"])
    if (name in message) { state[name] = message[name]; dirty.add(name); }
  takeRun(state, message);
  if (message.other) {
    if (message.other.reset || !state.other) state.other = empty();
    takeRun(state.other, message.other);
    dirty.add("other");
  }
  if (message.timeline) {
    state.lanes = message.timeline.lanes; state.laneNames = message.timeline.names;
    state.cells.splice(message.timeline.start, Infinity, ...message.timeline.cells);
    dirty.add("timeline");
  }
  if (message.workers) {
    for (const [id, row] of Object.entries(message.workers.changed)) state.workers.set(Number(id), row);
    for (const id of message.workers.gone) state.workers.delete(id);
    dirty.add("workers");
  }
  if (message.story) {
    const kept = new Map();
    for (const one of state.story.concat(message.story)) kept.set(one[3], [...(kept.get(one[3]) || []), one]);
    state.story = [...kept.values()].flatMap((list) => list.slice(-MOST_STORY)).sort((a, b) => a[1] - b[1] || a[0] - b[0]);
    dirty.add("story");
  }
  if (message.output) { state.output = state.output.concat(message.output).slice(-MOST_LINES); dirty.add("output"); }
  schedule();
}

// What curves are drawn from: of this run, and of one beside it.
function takeRun(into, message) {
  for (const name of ["run", "head", "looks", "recipe"])
    if (name in message) { into[name] = message[name]; dirty.add(name); }
  if (message.series) {
    into.points.splice(message.series.start, Infinity, ...message.series.points);
    into.span = message.series.span;
    dirty.add("series");
  }
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (message) => { if (!isHere) { isHere = true; dirty.add("head"); } take(JSON.parse(message.data)); };
  source.onerror = () => {
    if (isHere) { isHere = false; sinceHere = Date.now(); }
    dirty.add("head"); schedule();
    if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(listen, 2000); }
  };
}

let scheduled = false;
function schedule() {
  if (scheduled || document.hidden) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; const was = dirty; dirty = new Set(); draw(was); });
}

// What is drawn

function draw(changed) {
  const any = (...names) => changed.has("all") || names.some((name) => changed.has(name));
  drawHead();
  if (any("head", "run", "looks", "epochs")) drawFigures();
  if (any("can", "head", "run")) drawActions();
  if (any("series", "looks", "run", "other")) drawCharts();
  if (any("head", "looks", "run", "recipe", "other")) drawBoth();
  if (any("workers", "run", "can")) drawRows();
  if (any("timeline")) drawTimeline();
  if (any("story")) drawStory();
  if (any("output")) drawOutput();
  if (any("run", "recipe", "head")) drawSettings();
  if (any("epochs", "head")) drawProof();
  if (any("run", "workers")) drawHolds();
  if (any("samples")) drawSamples();
}

function standing() {
  const { head, run } = state;
  const quiet = head.step_at ? now() - head.step_at : 0;
  if (head.ended && !isHere) return ["done", head.ended.reason === "finished" ? "Finished" : head.ended.reason === "interrupted" ? "Stopped" : "Ended"];
  if (!isHere) return ["notice", `Nobody answers for ${duration((Date.now() - sinceHere) / 1000)}; trying again`];
  if (head.ended) return head.ended.reason === "finished" ? ["done", "Finished"] : head.ended.reason === "interrupted" ? ["notice", "Stopped"] : ["bad", "Ended with an error"];
  if (state.host_at && now() - state.host_at > 6) return ["bad", `The host is silent for ${duration(now() - state.host_at)}`];
  if (head.paused) return ["notice", "Paused"];
  if (!state.caught_up) return ["notice", "Reading the run"];
  if (!run.known) return ["notice", head.waits_for ? `Waiting for ${plural(head.waits_for, "more worker")}` : "Waiting for the first step"];
  if (quiet > Math.max(10, 6 * (head.step_s || 0))) return ["bad", `No step for ${duration(quiet)}`];
  return ["good", "Training"];
}

function drawHead() {
  const { head, run } = state;
  const [tone, text] = standing();
  $("status").dataset.tone = tone;
  write($("state"), text);
  write($("name"), run.name || "Potluck");
  const parts = [];
  if (run.parameters) parts.push(`${count(run.parameters)} parameters`);
  if (run.batch_size) parts.push(`${whole(run.batch_size)} rows a step`);
  if (run.policy) parts.push(run.policy);
  if (run.wire && run.wire !== "fp32") parts.push(`${run.wire} on the wire`);
  if (run.device_name || (run.device && run.device !== "any device")) parts.push(run.device_name || run.device);
  write($("what"), parts.join(" · "));
  write($("folder"), run.folder || "");
  const share = head.total ? Math.min(1, head.step / head.total) : head.ended ? 1 : 0;
  $("done").style.width = `${100 * share}%`;
  $("bar").setAttribute("aria-valuenow", Math.round(100 * share));
  write($("steps"), run.known ? `Step ${whole(head.step || 0)}${head.total ? ` of ${whole(head.total)}` : ""} · epoch ${whole((head.epoch || 0) + 1)} · ${whole(head.rows || 0)} rows${head.skipped ? ` · ${whole(head.skipped)} skipped` : ""}` : "");
  write($("ends"), ending());
  const title = run.known ? `${head.total ? `${Math.floor(100 * share)} % · ` : ""}${head.loss === null || head.loss === undefined ? "" : `loss ${head.loss.toFixed(3)} · `}${run.name}` : "Potluck";
  if (document.title !== title) document.title = title;
}

// An estimate that has passed, or of a run that nobody trains, is none.
function isTimeLeft() {
  const { head } = state;
  return Boolean(head.left && !head.ended && head.workers && head.step_at + head.left[2] >= now());
}

function ending() {
  const { head } = state;
  if (head.ended) return `ended ${new Date(1000 * head.ended.time).toLocaleString("en-GB")}`;
  if (!isTimeLeft() || head.paused) return "";
  const [best, least, most] = head.left.map((seconds) => head.step_at + seconds);
  const withSeconds = head.left[0] < 600, band = clock(least, withSeconds) !== clock(most, withSeconds);
  const day = best - now() > 43200 ? `${new Date(1000 * best).toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" })} ` : "";
  return `ends about ${day}${clock(best, withSeconds)}${band ? `, between ${clock(least, withSeconds)} and ${clock(most, withSeconds)}` : ""}`;
}

function drawFigures() {
  const { head, run, looks } = state;
  const unit = run.unit || "rows", look = looks[looks.length - 1], found = [];
  const best = looks.reduce((least, one) => one[2] !== null && (least === null || one[2] < least) ? one[2] : least, null);
  found.push(["Loss", figure(head.loss), head.norm === null || head.norm === undefined ? "" : `gradient norm ${figure(head.norm)}`]);
  if (look) {
    const named = namesIn(look).slice(0, 3).map((name) => [name, look[FIGURES][name]]).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    found.push(["Validation", look[2] === null ? named.split(", ")[0] : figure(look[2]), `step ${whole(look[3])}${best !== null && looks.length > 1 ? `, best ${figure(best)}` : ""}${named && look[2] !== null ? `; ${named}` : ""}`]);
  }
  found.push([`${unit[0].toUpperCase()}${unit.slice(1)} a second`, head.rate ? count(head.rate) : "–", head.mfu ? `${(100 * head.mfu).toPrecision(3)} % of the devices' peak (MFU)` : head.step_s ? `${duration2(head.step_s)} a step` : ""]);
  if (isTimeLeft()) found.push(["Time left", duration(head.left[0]), `${duration(head.left[1])} to ${duration(head.left[2])}`]);
  found.push(["Trained", duration(head.trained_s || 0), head.ended ? "without starting, pauses and stops" : `since ${run.at ? clock(run.at, false) : "–"}`]);
  found.push(["Workers", whole(head.workers || 0), head.paused ? "paused" : ""]);
  const [right, ended] = head.epochs || [0, 0];
  found.push(["Exactly once", ended ? (right === ended ? "Proved" : "Broken") : "–", ended ? `${plural(right, "epoch")} of ${whole(ended)}` : "at each epoch's end"]);
  if (head.bytes) found.push([head.bytes.counted ? "Sent and received" : "Sent, computed", bytes(head.bytes.sent + (head.bytes.received || 0)), head.bytes.saved > 0 ? `${bytes(head.bytes.saved)} saved by ${run.wire}` : "in full precision"]);
  const list = $("figures");
  while (list.children.length > found.length) list.lastChild.remove();
  found.forEach(([name, value, more], index) => {
    let box = list.children[index];
    if (!box) { box = make("div", {}, make("dt"), make("dd", {}, make("span"), make("small"))); list.append(box); }
    write(box.children[0], name); write(box.children[1].children[0], value); write(box.children[1].children[1], more);
  });
}
const duration2 = (seconds) => seconds < 1 ? `${Math.round(1000 * seconds)} ms` : seconds < 60 ? `${seconds.toFixed(1)} s` : duration(seconds);

// What a person may do

function drawActions() {
  const { can, head } = state, wanted = [];
  if (can.invite && !head.ended) wanted.push(["Line to join", showLine, "join"]);
  if (can.order && !head.ended) {
    wanted.push(head.paused ? ["Resume", () => order("resume"), "resume"] : ["Pause", () => order("pause"), "pause"]);
    wanted.push([head.saving ? "Saving" : "Save now", () => order("save"), "save"]);
  }
  const key = JSON.stringify([wanted.map((one) => one[0]), isHere]), box = $("actions");
  if (box.dataset.key === key) return;
  const held = document.activeElement && box.contains(document.activeElement) ? document.activeElement.dataset.what : null;
  box.dataset.key = key;
  box.replaceChildren(...wanted.map(([text, act, what]) => make("button", { type: "button", text, on: act, "data-what": what, disabled: !isHere || text === "Saving" ? "" : null })));
  for (const button of box.children) if (held && button.dataset.what === held) button.focus();
}

async function order(action, worker) {
  const body = JSON.stringify(worker === undefined ? { action } : { action, worker });
  try {
    const answer = await fetch("order", { method: "POST", body, headers: { "X-Potluck-Order": state.can.order } });
    if (!answer.ok) tell(await answer.text());
  } catch { tell("Nobody answers. Try again once the page is connected."); }
}
function letGo(id) {
  const row = state.workers.get(id);
  if (row && confirm(`Let ${row[NAME]} go? It leaves politely, and the run continues with the others.`)) order("let_go", id);
}
async function showLine() {
  try {
    const answer = await fetch("invite", { method: "POST" });
    const text = await answer.text();
    if (!answer.ok) return tell(text);
    $("line").textContent = text.trim();
    $("join").hidden = false; $("copy").focus();
  } catch { tell("Nobody answers. Try again once the page is connected."); }
}
function tell(text) { state.story = state.story.concat([[0, now(), state.head.step || 0, "run", "notice", text.trim()]]); dirty.add("story"); schedule(); }

// Charts

const PAD = { left: 54, right: 10, top: 8, bottom: 22 };

function surface(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  const tall = height || canvas.clientHeight;
  if (height) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(tall * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  return { pen, width, tall };
}
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  const each = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw) || raw, found = [];
  for (let at = Math.ceil(low / each) * each; at <= high + each * 1e-6; at += each) found.push(at);
  return found;
}
const short = (number) => number === 0 ? "0" : Math.abs(number) >= 1e4 ? count(number) : Math.abs(number) < 1e-3 ? number.toExponential(0) : `${+number.toPrecision(3)}`;
const timeTick = (seconds) => seconds >= 7200 ? `${+(seconds / 3600).toPrecision(3)} h` : seconds >= 180 ? `${+(seconds / 60).toPrecision(3)} min` : `${+seconds.toPrecision(3)} s`;

// options: lines: [{at: [[x, y]], colour, dots, dashed}], band: [[x, low, high]], zero
function chart(canvas, { lines, band, zero, label }) {
  const { pen, width, tall } = surface(canvas);
  canvas.setAttribute("aria-label", label);
  const xs = lines.flatMap((line) => line.at.map((one) => one[0]));
  const ys = lines.flatMap((line) => line.at.map((one) => one[1])).filter((one) => one !== null);
  if (!ys.length) { pen.fillStyle = style("--muted"); pen.fillText("Nothing yet", PAD.left, tall / 2); canvas.plot = null; return; }
  let low = Math.min(...ys), high = Math.max(...ys);
  if (zero) low = Math.min(0, low);
  if (high === low) { high += Math.abs(high) * .1 || 1; low -= zero ? 0 : Math.abs(low) * .1 || 1; }
  const room = (high - low) * .06; high += room; if (!zero) low -= room;
  const left = Math.min(...xs), right = Math.max(...xs, left + 1e-9);
  const x = (value) => PAD.left + (value - left) / (right - left) * (width - PAD.left - PAD.right);
  const y = (value) => tall - PAD.bottom - (value - low) / (high - low) * (tall - PAD.top - PAD.bottom);
  pen.strokeStyle = style("--line"); pen.fillStyle = style("--muted"); pen.lineWidth = 1;
  pen.textAlign = "right"; pen.textBaseline = "middle";
  for (const at of ticks(low, high, Math.max(3, tall / 55))) {
    if (y(at) < PAD.top - 1) continue;
    pen.beginPath(); pen.moveTo(PAD.left, Math.round(y(at)) + .5); pen.lineTo(width - PAD.right, Math.round(y(at)) + .5); pen.stroke();
    pen.fillText(short(at), PAD.left - 8, y(at));
  }
  pen.textAlign = "center"; pen.textBaseline = "alphabetic";
  for (const at of ticks(left, right, Math.max(4, width / 130))) {
    const text = byTime ? timeTick(at) : short(at), half = pen.measureText(text).width / 2;
    if (x(at) + half <= width && x(at) - half >= PAD.left - 20) pen.fillText(text, x(at), tall - 6);
  }
  pen.save();
  pen.beginPath(); pen.rect(PAD.left, PAD.top - 3, width - PAD.left - PAD.right + 4, tall - PAD.top - PAD.bottom + 6); pen.clip();
  if (band && band.length > 1) {
    pen.fillStyle = style("--band"); pen.beginPath();
    band.forEach(([at, , most], index) => index ? pen.lineTo(x(at), y(most)) : pen.moveTo(x(at), y(most)));
    for (const [at, least] of band.slice().reverse()) pen.lineTo(x(at), y(least));
    pen.fill();
  }
  for (const line of lines) {
    pen.strokeStyle = pen.fillStyle = line.colour; pen.lineWidth = line.dots ? 1.2 : 1.8; pen.lineJoin = "round";
    pen.setLineDash(line.dashed ? [5, 4] : []); pen.globalAlpha = line.dashed ? .65 : 1;
    pen.beginPath();
    let isDown = false;
    for (const [at, value] of line.at) {
      if (value === null) { isDown = false; continue; }
      if (isDown) pen.lineTo(x(at), y(value)); else pen.moveTo(x(at), y(value));
      isDown = true;
    }
    pen.stroke();
    pen.setLineDash([]);
    const spots = line.dots && line.at.length <= 80 ? line.at : line.at.slice(-1);
    for (const [at, value] of spots) if (value !== null) { pen.beginPath(); pen.arc(x(at), y(value), line.dots ? 3 : 2.5, 0, 7); pen.fill(); }
  }
  pen.globalAlpha = 1;
  pen.restore();
  canvas.plot = { x, y, left, right, lines, width, tall };
}

function drawCharts() {
  const { points, looks, run, other } = state, axis = byTime ? X_TIME : X_ROWS;
  const last = points[points.length - 1], where = byTime ? "time" : "rows", isWide = state.span > 1;
  const losses = linesOf("loss", (one) => one.points.map((point) => [point[axis], point[LOSS]]), {});
  const looked = looks.filter((look) => look[LOOKED] !== null);
  const validations = linesOf("validation", (one) => one.looks.filter((look) => look[LOOKED] !== null).map((look) => [look[axis], look[LOOKED]]), { dots: true });
  const band = isWide && !other ? points.filter((point) => point[LEAST] !== null).map((point) => [point[axis], point[LEAST], point[MOST]]) : null;
  chart($("loss"), { lines: [...losses, ...validations], band,
    label: last ? `Loss over ${where}: now ${figure(last[LOSS])}${looked.length ? `, validation ${figure(looked[looked.length - 1][LOOKED])}` : ""}` : "Loss: nothing yet" });
  for (const [id, place, name] of [["lr", LR, "learning rate"], ["norm", NORM, "gradient norm"]])
    chart($(id), { lines: linesOf(name, (one) => one.points.map((point) => [point[axis], point[place]]), {}), zero: true, label: last ? `${name} over ${where}: now ${figure(last[place])}` : `${name}: nothing yet` });
  drawFiguresByName(axis, where);
  const legend = [make("span", {}, make("i"), isWide ? `training, mean of ${whole(state.span)} steps each` : "training")];
  if (band) legend.push(make("span", {}, make("i", { class: "band" }), "least to most"));
  if (looked.length) legend.push(make("span", {}, make("i", { class: "second" }), "validation"));
  if (other) legend.push(make("span", {}, make("i", { class: "other" }), `dashed: ${other.run.name || "the other run"}`));
  const key = legend.map((one) => one.textContent).join();
  if ($("legend").dataset.key !== key) { $("legend").dataset.key = key; $("legend").replaceChildren(...legend); }
  write($("h-speed"), `Speed, ${run.unit || "rows"}/s`);
}

// A curve of this run, and the same of the run beside it, if there is one.
function linesOf(name, at, { dots, colour }) {
  const lines = [{ at: at(state), colour: colour || style(dots ? "--second" : "--accent"), dots, name }];
  if (state.other) lines.unshift({ at: at(state.other), colour: style(dots ? "--second" : "--accent"), dashed: true, name: `${name}, ${state.other.run.name || "other"}` });
  return lines.filter((line) => line.at.length);
}

// Names of an evaluation's figures beside the loss, which has a curve of its own.
const namesIn = (look) => Object.keys(look[FIGURES]).filter((name) => name !== "loss" || look[LOOKED] === null);

// Each figure that an evaluation gave has a curve of its own.
const named = new Map();
function drawFiguresByName(axis, where) {
  const names = new Set();
  for (const one of [state, state.other || empty()]) for (const look of one.looks) for (const name of namesIn(look)) names.add(name);
  const wanted = [...names].slice(0, curves);
  for (const [name, box] of named) if (!wanted.includes(name)) { box.remove(); named.delete(name); }
  wanted.forEach((name, index) => {
    let box = named.get(name);
    if (!box) {
      box = make("div", {}, make("h3", {}, make("span", { text: name }), make("b")), make("canvas", { class: "chart", role: "img" }));
      listenTo(box.lastChild);
      named.set(name, box);
    }
    if ($("small").children[index] !== box) $("small").insertBefore(box, $("small").children[index] || null);
    const values = state.looks.map((look) => look[FIGURES][name]).filter((value) => value !== null && value !== undefined), last = values[values.length - 1];
    write(box.firstChild.lastChild, values.length ? figure(last) : "");
    box.firstChild.lastChild.title = values.length > 1 ? `from ${figure(values.reduce((a, b) => Math.min(a, b)))} to ${figure(values.reduce((a, b) => Math.max(a, b)))}` : "";
    const at = (one) => one.looks.filter((look) => look[FIGURES][name] !== undefined).map((look) => [look[axis], look[FIGURES][name]]);
    chart(box.lastChild, { lines: linesOf(name, at, { dots: true }), label: `${name} over ${where}: now ${values.length ? figure(last) : "nothing"}` });
  });
  $("curves").hidden = names.size <= wanted.length;
  write($("more-curves"), `Show more: ${whole(wanted.length)} of ${plural(names.size, "figure")} are drawn`);
}

function hover(event) {
  const canvas = event.currentTarget, plot = canvas.plot, tip = $("tip");
  if (!plot) return;
  const box = canvas.getBoundingClientRect(), at = event.clientX - box.left;
  const texts = [];
  let place = null;
  for (const line of plot.lines) {
    let best = null;
    for (const one of line.at) if (one[1] !== null && (!best || Math.abs(plot.x(one[0]) - at) < Math.abs(plot.x(best[0]) - at))) best = one;
    if (best && (place === null || Math.abs(plot.x(best[0]) - at) < 40)) { place = place === null ? best[0] : place; texts.push(`${line.name} ${figure(best[1])}`); }
  }
  if (!texts.length) return;
  const point = state.points.find((one) => one[byTime ? X_TIME : X_ROWS] >= place);
  const step = point ? (point[FIRST] === point[LAST] ? `step ${whole(point[LAST])}` : `steps ${whole(point[FIRST])} to ${whole(point[LAST])}`) : "";
  tip.textContent = [[step, byTime ? timeTick(place) : `${whole(place)} rows`].filter(Boolean).join(", "), ...texts].join("\n");
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 10)}px`;
}

// Workers

const PHASES = { greeted: "building", catching_up: "catching up", ready: "in", in: "in", leaving: "leaving", gone: "gone" };
const trs = new Map();

function ordered() {
  const wanted = query.toLowerCase(), found = [];
  for (const [id, row] of state.workers)
    if (!wanted || `${row[NAME]} ${row[DEVICE]} ${row[PHASE]} ${row[LINK]} ${id}`.toLowerCase().includes(wanted)) found.push([id, row]);
  return found.sort((a, b) => (b[1][IN] - a[1][IN]) || a[0] - b[0]);
}

function drawRows() {
  const all = ordered(), rows = all.slice(0, shown), body = $("rows");
  const inside = all.filter(([, row]) => row[IN]).length;
  write($("crowd"), state.workers.size ? `${plural(inside, "worker")}${state.head.ended ? " at the end" : ""}${all.length > inside ? `, ${whole(all.length - inside)} gone` : ""}${query ? ` found of ${whole(state.workers.size)}` : ""}` : "Nobody is here yet");
  $("search").hidden = state.workers.size < 8;
  $("more").hidden = all.length <= shown;
  write($("show-more"), `Show more: ${whole(rows.length)} of ${whole(all.length)} are shown`);
  const isKnown = rows.some(([, row]) => row[MACHINE]);
  $("h-machine").hidden = !isKnown;
  const wanted = new Set(rows.map(([id]) => id));
  for (const [id, tr] of trs) if (!wanted.has(id)) { tr.remove(); trs.delete(id); }
  rows.forEach(([id, row], index) => {
    let tr = trs.get(id);
    if (!tr) { tr = makeRow(id); trs.set(id, tr); }
    if (body.children[index] !== tr) body.insertBefore(tr, body.children[index] || null);
    fillRow(tr, id, row);
    tr.children[4].hidden = !isKnown;
  });
  drawHeard();
}

function makeRow(id) {
  const cell = (label, kind, ...children) => make("td", { "data-label": label, class: kind }, ...children);
  const meter = (...kinds) => make("div", { class: "meter", "aria-hidden": "true" }, ...kinds.map((kind) => make("i", { class: kind })));
  const tr = make("tr", {},
    make("th", { scope: "row", class: "name" }), cell("Share of the rows", "share", make("span"), meter("own")), cell("Speed", "n", make("span")),
    cell("Busy and waiting", "", make("span"), meter("own", "send", "wait")), cell("Its machine", "machine"), cell("Link", "link"), cell("Phase", "phase", make("span"), make("small")),
    cell("Heard", "n heard"), cell("Why this share", "why"));
  const who = make("td", { class: "name" }, make("div", { class: "who" }, make("i"), make("span")), make("small"));
  tr.children[0].replaceWith(who);
  return tr;
}

function fillRow(tr, id, row) {
  const [who, share, speed, busy, machine, link, phase, , why] = tr.children;
  tr.classList.toggle("gone", !row[IN]);
  who.firstChild.firstChild.style.background = colour(id);
  write(who.firstChild.lastChild, row[NAME]); write(who.children[1], row[DEVICE]);
  write(share.firstChild, row[IN] ? `${percent(row[SHARE])}, ${plural(row[ROWS], "row")}` : "–");
  share.lastChild.firstChild.style.width = `${100 * row[SHARE]}%`; share.lastChild.firstChild.style.background = colour(id);
  write(speed.firstChild, row[SPEED] === null ? "–" : count(row[SPEED]));
  write(busy.firstChild, row[BUSY] === null ? "–" : `${percent(row[BUSY])} busy, ${percent(row[WAIT])} waiting${row[SEND] > .005 ? `, ${percent(row[SEND])} sending` : ""}`);
  [BUSY, SEND, WAIT].forEach((place, index) => { busy.lastChild.children[index].style.width = `${100 * (row[place] || 0)}%`; });
  busy.lastChild.firstChild.style.background = colour(id);
  fillMachine(machine, row[MACHINE], id);
  write(link, row[LINK] || (state.can.led ? "–" : "this group"));
  write(phase.firstChild, PHASES[row[PHASE]] || row[PHASE]); write(phase.children[1], row[DOING]);
  write(why, row[WHY]);
  const button = who.querySelector("button"), may = state.can.order && row[IN] && row[PHASE] !== "leaving" && !state.head.ended;
  if (may && !button) who.append(make("button", { type: "button", class: "quiet", text: "Let go", on: () => letGo(id), "aria-label": `Let ${row[NAME]} go` }));
  if (!may && button) button.remove();
}

// What a worker uses of its machine: [name, share, text] each.
function fillMachine(cell, parts, id) {
  const key = JSON.stringify(parts);
  if (cell.dataset.key === key) return;
  cell.dataset.key = key;
  cell.replaceChildren(...(parts || []).map(([name, share, text]) => {
    const fill = make("i");
    fill.style.width = `${100 * Math.min(1, share || 0)}%`; fill.style.background = colour(id);
    return make("div", { class: "use" }, make("span", { text: name }), make("small", { text }), make("div", { class: "meter", "aria-hidden": "true" }, fill));
  }));
}

// Silence counts up while it happens.
function drawHeard() {
  const isOver = Boolean(state.head.ended);
  for (const [id, tr] of trs) {
    const row = state.workers.get(id);
    if (!row) continue;
    const silent = Math.max(0, now() - row[HEARD]);
    write(tr.children[7], row[IN] && !isOver ? (silent < 2 ? "now" : `${duration(silent)} ago`) : "–");
    tr.classList.toggle("silent", row[IN] && !isOver && silent > Math.max(10, 6 * (state.head.step_s || 0)));
  }
}

function drawTimeline() {
  const canvas = $("timeline"), { lanes, laneNames, cells } = state;
  const each = lanes.length > 24 ? 12 : lanes.length > 10 ? 16 : 24, gap = each > 14 ? 4 : 2;
  const { pen, width, tall } = surface(canvas, Math.max(60, lanes.length * (each + gap) + 24));
  canvas.setAttribute("aria-label", lanes.length ? `How much of its time each of ${plural(lanes.length, "worker")} computed, over the whole run` : "Nothing yet");
  write($("lanes-note"), state.workers.size > lanes.length && lanes.length >= 48 ? `the first ${lanes.length} of ${whole(state.workers.size)}` : "");
  if (!cells.length) { pen.fillStyle = style("--muted"); pen.fillText("Nothing yet", 8, 30); return; }
  const names = Math.min(170, Math.max(60, ...laneNames.map((name) => pen.measureText(name).width + 18)), width * .34);
  const end = cells[cells.length - 1][1] || 1e-9, x = (seconds) => names + seconds / end * (width - names - 6);
  pen.textBaseline = "middle"; pen.textAlign = "left";
  lanes.forEach((id, lane) => {
    const top = lane * (each + gap);
    pen.fillStyle = style("--muted");
    pen.fillText(fitted(pen, laneNames[lane], names - 12), 0, top + each / 2);
    for (const [before, at, shares] of cells) {
      const share = shares[lane], from = x(before), to = x(at);
      if (!share) continue;
      const wide = Math.max(.6, to - from - (to - from > 5 ? 1 : 0)), busy = each * share[0] / 100, send = each * share[1] / 100;
      pen.fillStyle = style("--wait"); pen.fillRect(from, top, wide, each - busy - send);
      pen.fillStyle = style("--notice"); pen.fillRect(from, top + each - busy - send, wide, send);
      pen.fillStyle = colour(id); pen.fillRect(from, top + each - busy, wide, busy);
    }
  });
  pen.fillStyle = style("--muted"); pen.textAlign = "center"; pen.textBaseline = "alphabetic";
  for (const at of ticks(0, end, width / 140)) {
    const half = pen.measureText(timeTick(at)).width / 2;
    if (x(at) + half <= width) pen.fillText(timeTick(at), Math.max(x(at), names + half), tall - 5);
  }
}
function fitted(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text.length > 2 && pen.measureText(`${text}…`).width > room) text = text.slice(0, -1);
  return `${text}…`;
}

function drawStory() {
  for (const [id, button] of [...$("groups").children].map((one) => [one.dataset.group, one])) {
    const found = state.story.filter((one) => one[3] === id).length;
    write(button, id === "all" || !found ? GROUPS[id] : `${GROUPS[id]} ${found}`);
  }
  const told = state.story.filter((one) => one[3] !== "decisions" && (group === "all" || one[3] === group));
  const pinned = group === "all" ? told.filter((one) => one[3] === "workers").slice(-PINNED) : []; // else saves and epochs would push it out of sight
  tellIn($("story"), told.filter((one) => !pinned.includes(one)), pinned);
  const decided = state.story.filter((one) => one[3] === "decisions");
  tellIn($("decided"), decided);
  $("decided").hidden = $("h-decided").hidden = !decided.length;
}
function tellIn(list, told, pinned = []) {
  list.replaceChildren(...[...told.slice(-150), ...pinned].reverse().map(([number, at, step, , tone, text]) =>
    make("li", { "data-tone": tone, class: pinned.some((one) => one[0] === number) ? "pinned" : null }, make("div", {}, make("div", { text }), make("time", { text: `${clock(at)}${step ? ` · step ${whole(step)}` : ""}`, datetime: new Date(1000 * at).toISOString() })))));
  if (!told.length && !pinned.length) list.replaceChildren(make("li", { class: "none", text: "Nothing yet." }));
}

function drawOutput() {
  const list = $("output"), isAtEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 30;
  $("output-card").hidden = !state.output.length;
  const names = new Set(state.output.map((one) => one[2]));
  list.replaceChildren(...state.output.map(([, at, worker, text]) =>
    make("li", {}, make("time", { text: clock(at), title: worker }), names.size > 1 ? make("b", { text: worker }) : null, make("span", { text }))));
  write($("output-note"), names.size === 1 ? [...names][0] : `${whole(names.size)} workers`);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

// Settings: what the run says of itself, what its optimizer and its script were given, and the recipe.
function settingsOf({ run, recipe }) {
  const found = new Map();
  for (const [name, value] of [["arguments", (run.settings || {}).arguments], ["policy", run.policy], ["strategy", run.strategy], ["on the wire", run.wire], ["rows a step", run.batch_size && whole(run.batch_size)], ["steps", run.steps_total && whole(run.steps_total)], ...Object.entries(run.settings || {}), ...Object.entries(recipe)])
    if (value !== null && value !== undefined && value !== "" && value !== 0 && value !== "None") found.set(name, String(value));
  return found;
}
function drawSettings() {
  const found = [...settingsOf(state)], key = JSON.stringify(found);
  $("settings-card").hidden = !state.run.known || !found.length;
  if ($("settings").dataset.key === key) return;
  $("settings").dataset.key = key;
  $("settings").replaceChildren(...found.flatMap(([name, text]) => [make("dt", { text: name }), make("dd", { text })]));
}

// Two runs: what both came to, and the settings in which they differ.
function drawBoth() {
  const { other } = state;
  $("both-card").hidden = !other;
  if (!other) return;
  const best = (one) => one.looks.reduce((least, look) => look[LOOKED] !== null && (least === null || look[LOOKED] < least) ? look[LOOKED] : least, null);
  const rows = [["Step", (one) => whole(one.head.step || 0)], ["Loss", (one) => figure(one.head.loss)], ["Best validation", (one) => figure(best(one))]];
  const names = new Set([state, other].flatMap((one) => one.looks.flatMap(namesIn)));
  for (const name of [...names].slice(0, PAGE_OF_CURVES))
    rows.push([name, (one) => { const look = one.looks.findLast((each) => each[FIGURES][name] !== undefined); return figure(look ? look[FIGURES][name] : null); }]);
  rows.push(["Trained", (one) => duration(one.head.trained_s || 0)], ["Speed", (one) => one.head.rate ? `${count(one.head.rate)} ${one.run.unit || "rows"}/s` : "–"], ["Workers", (one) => whole(one.head.workers || 0)]);
  const [mine, others] = [settingsOf(state), settingsOf(other)];
  const differing = [...new Set([...mine.keys(), ...others.keys()])].filter((name) => name !== "name" && mine.get(name) !== others.get(name));
  for (const name of differing) rows.push([name, (one) => (one === other ? others : mine).get(name) || "–"]);
  const found = rows.map(([name, of]) => [name, of(state), of(other)]), heads = [state.run.folder || state.run.name || "this run", other.run.folder || other.run.name || "the other"];
  const key = JSON.stringify([heads, found]);
  if ($("both").dataset.key === key) return;
  $("both").dataset.key = key;
  $("both-head").replaceChildren(make("tr", {}, make("th", { scope: "col" }), ...heads.map((text, index) => make("th", { scope: "col" }, make("i", { class: index ? "other" : "own" }), text))));
  $("both").replaceChildren(...found.map(([name, ...values]) => make("tr", {}, make("th", { scope: "row", text: name }), ...values.map((text) => make("td", { text })))));
}

function drawProof() {
  const found = state.epochs.slice().reverse().map((one) => make("li", { class: one.used === one.total && one.same_weights ? "" : "bad", text: one.sentence }));
  const proved = state.epochs.length ? state.epochs[state.epochs.length - 1].epoch + 1 : 0, next = Math.max(state.head.epoch || 0, proved) + 1;
  const isDone = state.head.ended || (state.head.total && state.head.step >= state.head.total);
  if (!isDone || !found.length) found.unshift(make("li", { class: "none", text: isDone ? "No epoch has ended in this run." : `Epoch ${whole(next)} is under way; its proof comes at its end.` }));
  const key = found.map((one) => one.textContent).join();
  if ($("epochs").dataset.key !== key) { $("epochs").dataset.key = key; $("epochs").replaceChildren(...found); }
}

// Who holds what

const SPLIT = { shard_grad_op: [0, 1, 1], full_shard: [1, 1, 1], hybrid_shard: [1, 1, 1] };
const HELD = { shard_grad_op: "Weights are whole on each; gradients and the optimizer's state are split.", full_shard: "All is split: each holds its part.", hybrid_shard: "All is split within each machine." };

function drawHolds() {
  const { run } = state, box = $("holds");
  const inside = [...state.workers].filter(([, row]) => row[IN]).map(([id, row]) => [id, row[NAME]]);
  const key = JSON.stringify([run.strategy, run.layout, run.workers, inside.slice(0, 17), inside.length, isDark.matches]);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  if (run.layout) { box.replaceChildren(...stages(run.layout)); return; }
  const parts = state.can.led ? null : SPLIT[run.strategy], shownHere = inside.slice(0, 16), of = inside.length || 1;
  const grid = make("div", { class: "holds" }, make("b", { text: "worker" }), make("b", { text: "weights" }), make("b", { text: "gradients" }), make("b", { text: "optimizer" }));
  shownHere.forEach(([id, name], index) => {
    grid.append(make("span", { text: name }));
    for (let kind = 0; kind < 3; kind++) {
      const fill = make("i");
      fill.style.background = colour(id);
      fill.style.left = parts && parts[kind] ? `${100 * index / of}%` : "0";
      fill.style.width = parts && parts[kind] ? `${100 / of}%` : "100%";
      grid.append(make("div", { class: "track" }, fill));
    }
  });
  const text = HELD[run.strategy] && !state.can.led ? HELD[run.strategy] : "Each worker holds a whole replica.";
  box.replaceChildren(make("p", { class: "muted", text: run.known ? `${text}${inside.length > 16 ? ` The first 16 of ${whole(inside.length)} are shown.` : ""}` : "Nothing yet." }), ...(run.known ? [grid] : []));
}
function stages(layout) {
  const found = [...layout.matchAll(/^\s*(\d+)\s+(\d+(?:-\d+)?)\s+(.+?)\s{2,}([\d,]+)\s+(\d+%|-)/gm)];
  const row = make("div", { class: "stagebox" });
  for (const [, number, layers, names, parameters, share] of found) {
    const stage = make("div", { title: names }, make("strong", { text: `stage ${number}` }), make("div", { text: `layers ${layers}` }), make("div", { text: `${parameters} parameters` }));
    stage.style.flex = `${parseInt(share, 10) || 1} 1 0`; stage.style.background = `hsl(${hue(number)} 45% 36%)`;
    row.append(stage);
  }
  return [...(found.length ? [row] : []), make("pre", { text: layout, tabindex: "0" })];
}

function drawSamples() {
  $("writes-card").hidden = !state.samples.length;
  $("writes").replaceChildren(...state.samples.slice(-2).reverse().map((one) =>
    make("article", {}, make("small", { class: "muted", text: `after step ${whole(one.step)}` }), make("pre", {}, make("span", { text: one.prompt }), one.text))));
}

// A person

function choose(time) {
  byTime = time;
  $("by-rows").setAttribute("aria-pressed", String(!time)); $("by-time").setAttribute("aria-pressed", String(time));
  dirty.add("series"); schedule();
}
function list(id) {
  group = id;
  for (const button of $("groups").children) button.setAttribute("aria-pressed", String(button.dataset.group === id));
  dirty.add("story"); schedule();
}
function listenTo(canvas) {
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
}
function redraw() { dirty.add("all"); for (const id of ["holds", "legend", "both"]) delete $(id).dataset.key; schedule(); }

function begin() {
  if (location.search) history.replaceState(null, "", location.pathname); // the token is in a cookie by now
  $("by-rows").addEventListener("click", () => choose(false));
  $("by-time").addEventListener("click", () => choose(true));
  $("search").addEventListener("input", (event) => { query = event.target.value; shown = PAGE_OF_ROWS; dirty.add("workers"); schedule(); });
  $("show-more").addEventListener("click", () => { shown += 200; dirty.add("workers"); schedule(); });
  $("hide").addEventListener("click", () => { $("join").hidden = true; $("line").textContent = ""; });
  $("copy").addEventListener("click", async () => {
    try { await navigator.clipboard.writeText($("line").textContent); $("copy").textContent = "Copied"; } catch { getSelection().selectAllChildren($("line")); }
  });
  $("more-curves").addEventListener("click", () => { curves += PAGE_OF_CURVES; dirty.add("looks"); schedule(); });
  for (const id of ["loss", "lr", "norm"]) listenTo($(id));
  for (const [id, text] of Object.entries(GROUPS)) $("groups").append(make("button", { type: "button", text, "data-group": id, "aria-pressed": String(id === group), on: () => list(id) }));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA/.test(event.target.tagName)) return;
    if (event.key === "/" && !$("search").hidden) { event.preventDefault(); $("search").focus(); }
    if (event.key === "t") choose(!byTime);
  });
  document.addEventListener("visibilitychange", schedule);
  isDark.addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(document.body);
  setInterval(() => { if (!document.hidden) { drawHead(); drawHeard(); } }, 1000);
  listen();
  schedule();
}
begin();
