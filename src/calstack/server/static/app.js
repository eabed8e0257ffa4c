"use strict";
const at = (id) => document.getElementById(id);
const history = [];
let running = null;

const headers = () => ({ "content-type": "application/json", ...(at("key").value ? { authorization: `Bearer ${at("key").value}` } : {}) });
const say = (text) => { at("status").textContent = text; };

function show(role) {
  const box = document.createElement("article");
  box.className = role;
  const head = document.createElement("h2");
  head.textContent = role === "user" ? "You" : "Answer";
  const thought = document.createElement("details");
  thought.hidden = true;
  thought.append(Object.assign(document.createElement("summary"), { textContent: "Thought" }), document.createElement("span"));
  const text = document.createElement("div");
  box.append(head, thought, text);
  at("messages").append(box);
  return { box, thought, text };
}

function settings() {
  const out = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if (at(name).value !== "") out[name] = Number(at(name).value);
  }
  return out;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: {")) yield JSON.parse(block.slice(6));
    }
  }
}

async function answer() {
  const place = show("assistant");
  const system = at("system").value ? [{ role: "system", content: at("system").value }] : [];
  const body = { messages: [...system, ...history], stream: true, stream_options: { include_usage: true }, ...settings() };
  running = new AbortController();
  busy(true);
  const began = performance.now();
  let content = "";
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      if (delta.reasoning_content) {
        place.thought.hidden = false;
        place.thought.lastChild.textContent += delta.reasoning_content;
      }
      if (delta.content) {
        content += delta.content;
        place.text.textContent = content;
        at("messages").scrollTop = at("messages").scrollHeight;
      }
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        say(`${event.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`);
      }
    }
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`);
  }
  if (content) history.push({ role: "assistant", content });
  else place.box.remove();
  busy(false);
}

function busy(is) {
  at("send").disabled = is;
  at("stop").disabled = !is;
  at("again").disabled = is || !history.some((message) => message.role === "user");
  if (is) say("Answering…");
  else at("text").focus();
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running && !at("stop").disabled) return;
  const content = at("text").value;
  at("text").value = "";
  history.push({ role: "user", content });
  show("user").text.textContent = content;
  answer();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("again").addEventListener("click", () => {
  if (history.at(-1)?.role === "assistant") {
    history.pop();
    at("messages").lastChild.remove();
  }
  answer();
});
at("clear").addEventListener("click", () => {
  running?.abort();
  history.length = 0;
  at("messages").replaceChildren();
  at("again").disabled = true;
  say("");
});

const SHOWN = [
  ["Requests running", "llamacpp:requests_processing"],
  ["Requests waiting", "llamacpp:requests_deferred"],
  ["Output tokens", "llamacpp:tokens_predicted_total"],
  ["KV blocks used", "calrt_kv_used_blocks"],
  ["KV blocks", "calrt_kv_total_blocks"],
];
let last = null;

async function measure() {
  if (!at("dashboard").open) return;
  const response = await fetch("/metrics", { headers: headers() });
  if (!response.ok) return;
  const found = new Map();
  for (const line of (await response.text()).split("\n")) {
    const cut = line.lastIndexOf(" ");
    if (line && !line.startsWith("#")) found.set(line.slice(0, cut), Number(line.slice(cut + 1)));
  }
  const now = performance.now();
  const made = found.get("llamacpp:tokens_predicted_total") ?? 0;
  const rate = last ? (made - last.made) / ((now - last.now) / 1000) : 0;
  last = { made, now };
  const first = found.get("calrt_ttft_ms_sum") / found.get("calrt_ttft_ms_count");
  const rows = [["Tokens a second", rate.toFixed(1)], ["Mean time to first token", Number.isFinite(first) ? `${first.toFixed(0)} ms` : "–"]];
  rows.push(...SHOWN.map(([text, name]) => [text, found.get(name) ?? "–"]));
  for (const [name, value] of found) {
    if (name.startsWith("calrt_step_seconds_total")) rows.push([`Time: ${name.split('"')[1]}`, `${value.toFixed(1)} s`]);
    if (name.startsWith("calrt_device_dram_used_bytes")) rows.push([`Memory, chip ${name.split('"')[1]}`, `${(value / 2 ** 20).toFixed(0)} MiB`]);
  }
  at("rows").replaceChildren(...rows.map(([text, value]) => {
    const row = document.createElement("tr");
    row.append(Object.assign(document.createElement("th"), { scope: "row", textContent: text }), Object.assign(document.createElement("td"), { textContent: value }));
    return row;
  }));
}
setInterval(() => measure().catch(() => {}), 2000);
at("dashboard").addEventListener("toggle", () => measure().catch(() => {}));
fetch("/v1/models", { headers: headers() }).then((r) => r.json()).then((m) => { at("model").textContent = m.data?.[0]?.id ?? ""; }).catch(() => {});
