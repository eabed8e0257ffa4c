// The chat. No build step, no library: what is here is what runs.
import { watch } from "/static/dashboard.js";
import { chat, headers } from "/static/stream.js";
import { TokenText, hide } from "/static/tokens.js";

const at = (id) => document.getElementById(id);
const make = (name, text, fields = {}) => Object.assign(document.createElement(name), { textContent: text, ...fields });
const say = (text) => { at("status").textContent = text; };
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const messages = []; // of the conversation, as the route takes them
let running = null;

// --- what the settings ask for ----------------------------------------------------------------------------------------------

function settings() {
  const out = {};
  for (const name of NUMBERS) {
    if (at(name).value !== "") out[name] = Number(at(name).value);
  }
  if (at("probabilities").checked) Object.assign(out, { logprobs: true, top_logprobs: 5 });
  if (!at("thinking").checked) out.chat_template_kwargs = { enable_thinking: false };
  if (at("tools").value.trim()) {
    const given = JSON.parse(at("tools").value);
    if (!Array.isArray(given)) throw new Error("tools are an array");
    out.tools = given.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
  }
  return out;
}

// --- one message on the page ------------------------------------------------------------------------------------------------

class Shown {
  constructor(role) {
    this.box = make("article", "", { className: role });
    this.name = make("h2", role === "user" ? "You" : "Answer");
    this.thought = make("details", "", { hidden: true });
    this.summary = make("summary", "Thinking…");
    this.thoughtText = make("div", "");
    this.thought.append(this.summary, this.thoughtText);
    this.text = make("div", "", { className: "text" });
    this.calls = [];
    this.note = make("p", "", { className: "note", hidden: true });
    this.box.append(this.name, this.thought, this.text, this.note);
    this.tokens = null;
    at("empty").hidden = true;
    at("messages").append(this.box);
  }

  think(text) {
    this.thought.hidden = false;
    this.thoughtText.append(text);
  }

  thoughtOver(tokens) {
    if (!this.thought.hidden) this.summary.textContent = tokens ? `Thought for ${tokens} tokens` : "Thought";
  }

  say(text, entries) {
    if (entries) {
      this.tokens ??= new TokenText(this.text);
      this.tokens.add(entries);
    } else {
      this.text.append(text);
    }
  }

  call(piece) {
    let call = this.calls[piece.index];
    if (!call) {
      call = this.calls[piece.index] = { id: piece.id, name: piece.function.name, arguments: "", box: make("div", "", { className: "call" }) };
      call.pre = make("pre", "");
      const head = make("div", "Calls ");
      head.append(make("strong", call.name));
      call.box.append(head, call.pre);
      this.box.insertBefore(call.box, this.note);
    }
    call.arguments += piece.function.arguments ?? "";
    call.pre.textContent = pretty(call.arguments);
  }

  foot(text, failed = false) {
    this.note.hidden = false;
    this.note.textContent = text;
    this.note.classList.toggle("failed", failed);
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function follow() {
  const log = at("messages");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

// --- an answer --------------------------------------------------------------------------------------------------------------

async function answer() {
  const shown = new Shown("assistant");
  const message = { role: "assistant", content: "" };
  const own = (running = new AbortController());
  busy(true);
  shown.box.classList.add("streaming");
  const began = performance.now();
  let first = null;
  let finish = null;
  let usage = null;
  try {
    const system = at("system").value ? [{ role: "system", content: at("system").value }] : [];
    const body = { messages: [...system, ...messages], stream: true, stream_options: { include_usage: true }, ...settings() };
    for await (const event of chat(body, own.signal)) {
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        finish = choice.finish_reason ?? finish;
        const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
        if (content || thought || calls) first ??= performance.now();
        if (thought) shown.think(thought);
        if (content) {
          shown.thoughtOver();
          message.content += content;
          shown.say(content, choice.logprobs?.content);
        }
        for (const piece of calls ?? []) shown.call(piece);
      }
      follow();
    }
    const spent = usage?.completion_tokens_details?.reasoning_tokens;
    shown.thoughtOver(spent);
    shown.foot(summary(usage, finish, began, first));
    say("");
  } catch (error) {
    const stopped = error.name === "AbortError";
    shown.thoughtOver();
    shown.foot(stopped ? "Stopped" : error.message, !stopped);
    say(stopped ? "Stopped." : "The answer failed.");
  }
  shown.box.classList.remove("streaming");
  if (shown.calls.length) {
    message.tool_calls = shown.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  }
  if (message.content || message.tool_calls) messages.push(message);
  if (running === own) busy(false);
  if (shown.calls.length) askForResults(shown);
}

function summary(usage, finish, began, first) {
  if (!usage) return "";
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const parts = [`${usage.completion_tokens} tokens`];
  if (seconds > 0 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} a second`);
  if (first !== null) parts.push(`first after ${(first - began).toFixed(0)} ms`);
  if (finish === "length") parts.push("cut at the token limit");
  return parts.join(" · ");
}

/** Fields for what the called functions gave; with the last one filled in, the model goes on. */
function askForResults(shown) {
  const open = new Set(shown.calls);
  for (const call of shown.calls) {
    const form = make("form", "", { className: "result" });
    const label = make("label", `Result of ${call.name} `);
    const input = make("input", "", { required: true });
    label.append(input);
    form.append(label, make("button", "Give"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      messages.push({ role: "tool", tool_call_id: call.id, content: input.value });
      form.replaceWith(make("pre", `→ ${input.value}`));
      open.delete(call);
      if (!open.size) answer();
    });
    call.box.append(form);
  }
  at("messages").scrollTop = at("messages").scrollHeight;
  shown.box.querySelector(".result input").focus();
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  at("again").disabled = is || !messages.some((message) => message.role === "user");
  if (is) say("Answering…");
  else {
    running = null;
    if (document.activeElement === document.body || document.activeElement === at("stop")) at("text").focus();
  }
}

// --- what people do ---------------------------------------------------------------------------------------------------------

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const content = at("text").value;
  at("text").value = "";
  messages.push({ role: "user", content });
  new Shown("user").say(content);
  at("messages").scrollTop = at("messages").scrollHeight;
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
  while (messages.at(-1)?.role !== "user") messages.pop();
  const log = at("messages");
  while (log.lastElementChild.className !== "user") log.lastElementChild.remove();
  hide();
  answer();
});
at("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  for (const box of document.querySelectorAll("#messages article")) box.remove();
  at("empty").hidden = false;
  at("again").disabled = true;
  hide();
  say("");
  at("text").focus();
});
for (const name of ["settings", "dashboard"]) {
  at(`show-${name}`).addEventListener("click", () => {
    const open = at(name).hidden;
    at(name).hidden = !open;
    at(`show-${name}`).ariaExpanded = String(open);
    if (name === "dashboard") watch(open);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

async function greet() {
  const state = (text, kind) => {
    at("state").textContent = text;
    at("state").dataset.state = kind;
  };
  try {
    const health = await fetch("/health");
    const told = await health.json();
    if (!health.ok) {
      state(told.error.message, "loading");
      setTimeout(greet, 1000);
      return;
    }
    state(`ready on ${told.device}`, "ready");
    const models = await fetch("/v1/models", { headers: headers() });
    at("model").textContent = models.ok ? (await models.json()).data[0].id : "API key wanted";
  } catch {
    state("not reachable", "down");
    setTimeout(greet, 2000);
  }
}
at("key").addEventListener("change", greet);
greet();
