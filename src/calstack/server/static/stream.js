// Server-sent events over fetch: unlike EventSource it can send a key and a body.

export const headers = () => {
  const key = document.getElementById("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
};

export async function* events(response) {
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

export async function* chat(body, signal) {
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `status ${response.status}`);
  }
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}
