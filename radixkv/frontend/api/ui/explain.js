"use strict";
// The doctor, and explanations of prompts. It goes before page.js into the same script.

async function showDoctor() {
  if (!stream) return;
  try {
    const report = await (await request("cache/doctor")).json();
    at("doctor-summary").textContent = report.text;
    at("doctor").replaceChildren(...report.misses.map((miss) => {
      const share = make("div", { className: "bar" });
      share.style.width = `${100 * miss.share}%`;
      return make("li", {}, miss.text, share);
    }));
  } catch (error) {
    at("doctor-summary").textContent = error.message;
  }
}

class NotARequest extends Error {}

/** Returns the bodies that a text has: the text itself as a prompt, a request's JSON, or one request a line. */
function bodiesOf(text, isText) {
  if (isText || !/^\s*[{[]/.test(text)) return [["", { prompt: text }]];
  let whole;
  try {
    whole = JSON.parse(text);
  } catch (error) {
    const lines = text.split("\n").map((line, index) => [`Line ${index + 1}: `, line]).filter(([, line]) => line.trim());
    if (lines.length < 2 || !isJson(lines[0][1])) throw new NotARequest(`This begins like the JSON of a request and is none: ${error.message}. To explain it as a prompt, choose "text".`);
    return lines.map(([where, line]) => {
      if (!isJson(line)) throw new NotARequest(`${where}this is no JSON. Each line has to be a request.`);
      return [where, JSON.parse(line)];
    });
  }
  return [["", Array.isArray(whole) ? { [typeof whole[0] === "number" ? "prompt" : "messages"]: whole } : whole]];
}

function isJson(text) {
  try {
    return Boolean(JSON.parse(text)) || true;
  } catch {
    return false;
  }
}

/** Returns the questions to /cache/explain that a request's body asks: the API's path and the body, one a prompt. */
function questionsOf(body, where) {
  if (typeof body?.body === "object") return questionsOf(body.body, where); // a line of a batch
  const { model, ...rest } = body ?? {}; // there is one model, whatever the client calls it
  const prompt = rest.prompt ?? rest.prompt_token_ids ?? rest.text ?? rest.input_ids;
  if (rest.messages) return [[isMessages(rest) ? "/v1/messages" : "", rest]];
  if (prompt !== undefined) {
    const { text, input_ids, prompt_token_ids, sampling_params, ...others } = rest;
    const isList = Array.isArray(prompt) && typeof prompt[0] !== "number" && prompt.length;
    return (isList ? prompt : [prompt]).map((one) => ["", { ...others, prompt: one }]);
  }
  if (rest.input !== undefined) return [["/v1/responses", rest]];
  throw new NotARequest(`${where}this JSON is no request: it has no messages, prompt, input or text.`);
}

/** Tells a body of Anthropic's Messages from one of OpenAI's chats. */
function isMessages({ messages, tools, ...rest }) {
  const names = ["system", "stop_sequences", "thinking", "anthropic_version", "context_management"];
  const types = ["tool_use", "tool_result", "thinking", "redacted_thinking"];
  return names.some((name) => name in rest) || [tools].flat().some((tool) => tool?.input_schema) ||
    messages.some?.((message) => Array.isArray(message?.content) && message.content.some((part) => types.includes(part?.type) || part?.cache_control));
}

async function explain() {
  const salt = at("explain-salt").value, shown = [];
  for (const [where, body] of bodiesOf(at("explain-text").value, at("explain-kind").value === "text")) {
    const questions = questionsOf(body, where);
    for (const [index, [path, question]] of questions.entries()) {
      const label = questions.length > 1 ? `${where}prompt ${index + 1}: ` : where;
      try {
        shown.push(...(await explainOne(label, path, salt ? { ...question, cache_salt: salt } : question)));
      } catch (error) {
        throw error instanceof NeedsKey ? error : new Error(label + error.message);
      }
    }
  }
  return shown;
}

async function explainOne(label, path, body) {
  const found = await post(`cache/explain?return_token_ids=true&path=${encodeURIComponent(path)}`, body);
  const shown = [make("p", {}, label + found.text)];
  const tokens = found.prompt_token_ids, count = tokens.length;
  const cached = found.cached_tokens, difference = found.first_difference;
  const differs = difference?.position ?? count;
  const parts = [[0, Math.min(cached, differs)], [Math.min(cached, differs), differs], [differs, differs + 1], [differs + 1, count]];
  const texts = await Promise.all(parts.map(async ([from, to]) => (from < to && from < count ? (await post("detokenize", { tokens: tokens.slice(from, to) })).prompt : "")));
  const box = make("div", { className: "text", tabIndex: 0 }, make("span", { className: "cached", title: "cached" }, texts[0]), texts[1]);
  if (texts[2]) {
    const other = difference.cached_token;
    const title = other ? `token ${differs}; the cache has ${JSON.stringify(other.text ?? other.id)}` : `token ${differs}`;
    box.append(make("mark", { title }, texts[2]), texts[3]);
  }
  shown.push(box);
  const legend = [];
  if (cached) legend.push(`Green: the first ${number.format(cached)} tokens, which are cached.`);
  if (texts[2]) legend.push(`Red: token ${number.format(differs)}, the first that differs.`);
  if (legend.length) shown.push(make("p", { className: "hint" }, legend.join(" ")));
  return shown;
}

async function submitExplain(event) {
  event.preventDefault();
  try {
    at("explained").replaceChildren(...(await explain()));
  } catch (error) {
    if (error instanceof NeedsKey) return askForKey(error.message);
    at("explained").replaceChildren(make("p", { className: "error", role: "alert" }, error.message));
  }
}
