// The live dashboard, from /metrics/events: one event a second while it is open.
import { events, headers } from "/static/stream.js";

const at = (id) => document.getElementById(id);
const LENGTH = 60; // events on the curve
const PARTS = { infer: "computing", h2d: "to the device", d2h: "from the device", framework: "scheduling", idle: "idle" };
let watching = null;
let rates = [];
let last = null;

const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(0)} MiB`);
const make = (name, text, fields = {}) => Object.assign(document.createElement(name), { textContent: text, ...fields });

export async function watch(is) {
  watching?.abort();
  watching = null;
  if (!is) return;
  const own = (watching = new AbortController());
  last = null;
  while (!own.signal.aborted) {
    try {
      const response = await fetch("/metrics/events", { headers: headers(), signal: own.signal });
      if (!response.ok) throw new Error(`status ${response.status}`);
      for await (const event of events(response)) draw(event);
    } catch (error) {
      if (error.name === "AbortError") return;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

function draw(now) {
  const before = last ?? now;
  const seconds = now.time_s - before.time_s;
  rates = [...rates, seconds > 0 ? Math.max(0, now.output_tokens - before.output_tokens) / seconds : 0].slice(-LENGTH);
  const first = now.first_tokens ? now.first_token_ms / now.first_tokens : null;
  figures([
    ["Tokens a second", rates.at(-1).toFixed(rates.at(-1) < 10 ? 1 : 0), ""],
    ["First token, mean", first === null ? "–" : first.toFixed(0), first === null ? "" : "ms"],
    ["Running", now.running, `of ${now.lanes} lanes`],
    ["Waiting", now.waiting, ""],
    ["KV blocks", now.kv_used, `of ${now.kv_total}`],
    ["Output tokens", now.output_tokens.toLocaleString("en"), ""],
  ]);
  curve();
  split(now.times_s, before.times_s);
  memory(now.memory_used, now.memory_total);
  last = now;
}

function figures(rows) {
  at("figures").replaceChildren(...rows.map(([name, value, unit]) => {
    const box = document.createElement("div");
    const figure = make("dd", `${value} `);
    figure.append(make("small", unit));
    box.append(make("dt", name), figure);
    return box;
  }));
}

function curve() {
  const highest = Math.max(1, ...rates);
  const step = 240 / (LENGTH - 1);
  const start = 240 - step * (rates.length - 1);
  const points = rates.map((rate, place) => `${(start + place * step).toFixed(1)},${(58 - (rate / highest) * 54).toFixed(1)}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", `M${start.toFixed(1)},60 L${points.join(" L")} L240,60 Z`);
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = `now ${rates.at(-1).toFixed(0)}, highest ${highest.toFixed(0)}`;
  at("rate").replaceChildren(title, path);
}

function split(times, before) {
  const names = Object.keys(PARTS).filter((name) => name in times);
  let parts = names.map((name) => times[name] - (before[name] ?? 0));
  if (parts.every((part) => part <= 0)) parts = names.map((name) => times[name]);
  const all = parts.reduce((sum, part) => sum + Math.max(part, 0), 0) || 1;
  const shares = parts.map((part) => (100 * Math.max(part, 0)) / all);
  at("split").replaceChildren(...shares.map((share, place) => {
    const bar = make("div", "");
    bar.dataset.part = names[place] === "idle" ? 4 : place;
    bar.style.width = `${share}%`;
    return bar;
  }));
  const texts = names.map((name, place) => `${PARTS[name]} ${shares[place].toFixed(0)} %`);
  at("split").ariaLabel = texts.join(", ");
  at("legend").replaceChildren(...texts.map((text, place) => {
    const item = make("li", "");
    const mark = make("span", "");
    mark.dataset.part = names[place] === "idle" ? 4 : place;
    item.append(mark, text);
    return item;
  }));
}

function memory(used, total) {
  at("memory").replaceChildren(...used.flatMap((bytes, chip) => {
    const bar = make("div", "", { className: "bar", role: "img", ariaLabel: `${size(bytes)} used` });
    const fill = make("div", "");
    fill.style.width = `${Math.min(100, (100 * bytes * used.length) / (total || bytes || 1))}%`;
    bar.append(fill);
    const whole = total ? ` of ${size(total / used.length)}` : "";
    return [make("p", `${used.length > 1 ? `Chip ${chip}: ` : ""}${size(bytes)}${whole}`), bar];
  }));
}
