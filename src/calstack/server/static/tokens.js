// An answer's tokens with their probabilities: shown on hover, and with the arrow keys once the text has the focus.

const tip = document.getElementById("tip");
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

export class TokenText {
  constructor(element) {
    this.element = element;
    this.entries = [];
    this.current = -1;
    this.held = null; // bytes of a character that is not whole
    element.addEventListener("pointerover", (event) => this.#point(event.target));
    element.addEventListener("pointerleave", hide);
    element.addEventListener("keydown", (event) => this.#key(event));
    element.addEventListener("blur", () => this.#select(-1));
  }

  add(entries) {
    if (!this.entries.length) {
      Object.assign(this.element, { tabIndex: 0, role: "group", ariaLabel: "Answer with token probabilities; arrow keys go through the tokens" });
    }
    const decoder = new TextDecoder();
    for (const entry of entries) {
      const bytes = [...(this.held ?? []), ...entry.bytes];
      const text = decoder.decode(new Uint8Array(bytes));
      this.held = text.endsWith("\ufffd") ? bytes : null;
      const span = document.createElement("span");
      span.className = "token";
      span.textContent = this.held ? "" : text;
      span.style.setProperty("--p", Math.exp(entry.logprob).toFixed(3));
      span.dataset.place = this.entries.length;
      this.entries.push(entry);
      this.element.append(span);
    }
  }

  #point(target) {
    if (target.dataset.place === undefined) hide();
    else this.#show(Number(target.dataset.place));
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.#select(-1);
    if (step === undefined) return;
    event.preventDefault();
    this.#select(Math.max(0, Math.min(this.entries.length - 1, this.current + step)));
  }

  #select(place) {
    this.element.querySelector(".current")?.classList.remove("current");
    this.current = place;
    if (place < 0) {
      hide();
      return;
    }
    this.#show(place);
    this.element.children[place].classList.add("current");
  }

  #show(place) {
    const entry = this.entries[place];
    const others = entry.top_logprobs.filter((other) => other.id !== entry.id);
    const rows = [entry, ...others].sort((a, b) => b.logprob - a.logprob);
    const table = document.createElement("table");
    for (const row of rows) {
      const line = table.insertRow();
      line.className = row === entry ? "chosen" : "";
      const name = document.createElement("th");
      name.scope = "row";
      name.textContent = visible(row.token);
      line.append(name);
      line.insertCell().textContent = percent(row.logprob);
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const box = this.element.children[place].getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    const below = box.bottom + 6;
    tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : box.top - tip.offsetHeight - 6}px`;
    this.element.setAttribute("aria-describedby", "tip");
  }
}

export function hide() {
  tip.hidden = true;
}
