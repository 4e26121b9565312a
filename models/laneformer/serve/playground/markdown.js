// Markdown of a model as DOM nodes while it streams. The text only ever becomes text nodes, so it cannot run as HTML.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const QUOTE = /^ {0,3}> ?/;
const DEEPER = /^( {2,}|\t)\S/;
const TABLE_RULE = /^(?=.*-) *\|? *:?-*:? *(\| *:?-*:? *)*$/;
const UNDECIDED = /\n[\s\d.)*+\-_#>`~|:]{0,12}$/;  // a last line that may yet become an item, a rule, a table, a fence
const closes = (line, fence) => line.trim().startsWith(fence) && /^ {0,3}(`+|~+) *$/.test(line);
const isOrdered = (line) => /^ *\d/.test(line);
const begins = (line) => [FENCE, HEADING, RULE, ITEM, QUOTE].some((form) => form.test(line));

/** Renders a text that grows into `target`: only its last block is drawn again, and of code only the last line. */
export class Markdown {
  constructor(target) {
    Object.assign(this, { target, text: "", from: 0, last: null, code: null });
  }

  push(more) {
    this.text += more;
    this.render(false);
  }

  end() {
    this.render(true);
    this.from = this.text.length;
  }

  render(over) {
    const rest = this.text.slice(this.from), base = this.from;
    const parsed = blocks(over ? rest : rest.replace(UNDECIDED, "\n"));
    for (const [i, block] of parsed.entries()) {
      const growing = i === parsed.length - 1 && !over;
      if (this.code && block.kind === "code") {
        this.code.fill(block.lines, !growing || block.closed);
      } else {
        this.last?.remove();
        this.code = growing && block.named ? new Code(block.language) : null;
        this.code?.fill(block.lines, block.closed);
        this.target.append((this.last = this.code?.figure || element(block)));
      }
      if (growing) this.from = base + block.start;
      else this.last = this.code = null;
    }
  }
}

/** A block of code with its language and a button; a line is added once it is whole. */
class Code {
  constructor(language) {
    const copy = make("button", { class: "copy", type: "button" }, "Copy");
    this.body = make("code");
    this.figure = make("figure", { class: "code" }, make("figcaption", {}, language || "text", copy), make("pre", { tabindex: "0" }, this.body));
    Object.assign(this, { whole: 0, rest: new Text() });
  }

  /** `complete`: the last line will not grow. */
  fill(lines, complete) {
    const until = complete ? lines.length : lines.length - 1;
    this.rest.remove();
    for (; this.whole < until; this.whole++) this.body.append(lines[this.whole], "\n");
    this.rest.data = complete ? "" : lines[until];
    this.body.append(this.rest);
  }
}

/** The blocks of a text: {kind, start (offset), and what the kind needs}. */
function blocks(text) {
  const lines = text.split("\n"), parsed = [];
  let i = 0, start = 0, counted = 0;
  const take = (goes_on) => {
    const first = i++;
    while (i < lines.length && goes_on(lines[i], i)) i++;
    return lines.slice(first, i);
  };
  const in_list = (ordered) => (line, n) => {
    const fits = (next) => DEEPER.test(next) || (ITEM.test(next) && isOrdered(next) === ordered);
    return line.trim() ? fits(line) || (lines[n - 1].trim() && !begins(line)) : fits(lines[n + 1] ?? "");
  };
  const add = (kind, content) => parsed.push({ kind, start, ...content });
  while (i < lines.length) {
    const line = lines[i], fence = line.match(FENCE), heading = line.match(HEADING);
    for (; counted < i; counted++) start += lines[counted].length + 1;
    if (!line.trim()) i++;
    else if (fence) {
      const named = i + 1 < lines.length, body = take((next) => !closes(next, fence[1])).slice(1), closed = i++ < lines.length;
      add("code", { language: fence[2], named, closed, lines: body });
    } else if (heading) add(`h${Math.min(6, heading[1].length + 2)}`, { text: heading[2], lines: take(() => false) });  // below the page's own
    else if (RULE.test(line)) add("hr", { lines: take(() => false) });
    else if (QUOTE.test(line)) add("blockquote", { lines: take((next) => QUOTE.test(next)).map((quoted) => quoted.replace(QUOTE, "")) });
    else if (ITEM.test(line)) add(isOrdered(line) ? "ol" : "ul", { lines: take(in_list(isOrdered(line))) });
    else if (line.includes("|") && TABLE_RULE.test(lines[i + 1] ?? "")) add("table", { lines: take((next) => next.includes("|")) });
    else add("p", { text: take((next) => next.trim() && !begins(next)).join("\n") });
  }
  return parsed;
}

function element({ kind, lines, text, language }) {
  if (kind === "code") {
    const code = new Code(language);
    code.fill(lines, true);
    return code.figure;
  }
  if (kind === "ol" || kind === "ul") return list(kind, lines);
  if (kind === "blockquote") return make(kind, {}, ...blocks(lines.join("\n")).map(element));
  return kind === "table" ? table(lines) : make(kind, {}, ...inline(text || ""));
}

/** What stands deeper than an item's mark is read as blocks of the item: lists in lists, code in lists. */
function list(kind, lines) {
  const [mark, margin, number] = lines[0].match(ITEM), items = [];
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= margin.length + 1) items.push([line.slice(item[0].length)]);
    else items.at(-1).push(line.slice(0, mark.length).trimStart() + line.slice(mark.length));
  }
  const content = (block, i) => (block.kind === "p" && i === 0 ? inline(block.text) : [element(block)]);
  const rows = items.map((own) => make("li", {}, ...blocks(own.join("\n")).flatMap(content)));
  return make(kind, kind === "ol" ? { start: parseInt(number, 10) } : {}, ...rows);
}

function table([head, rule, ...rows]) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const sides = cells(rule ?? "").map((cell) => (/^:.*:$/.test(cell) ? "center" : cell.endsWith(":") ? "right" : "left"));
  const row = (line, tag) => make("tr", {}, ...sides.map((side, i) => make(tag, { class: side }, ...inline(cells(line)[i] ?? ""))));
  const whole = make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((line) => row(line, "td"))));
  return make("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Table" }, whole);
}

// what stands inside a line: escapes, code, links, bare addresses, strong, emphasis, struck out, line breaks
const INLINE = new RegExp(
  [
    "\\\\(?<escaped>[\\\\`*_{}\\[\\]()#+\\-.!|~<>])",
    "(?<ticks>`+)(?<code>[^`]|[^`].*?[^`])\\k<ticks>(?!`)",
    String.raw`!?\[(?<label>[^\[\]]*)\]\((?<target>[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+"[^"]*")?\)`,
    String.raw`(?<bare>https?:\/\/[^\s<>()"']*[^\s<>()"'.,;:!?*_])`,
    String.raw`\*\*(?<strong>\S(?:.*?\S)??)\*\*(?!\*)|(?<!\w)__(?<strong2>\S(?:.*?\S)??)__(?!\w)`,
    String.raw`(?<!\w)\*(?<em>[^\s*](?:[^*]*?[^\s*])??)\*|(?<!\w)_(?<em2>[^\s_](?:[^_]*?[^\s_])??)_(?!\w)`,
    String.raw`~~(?<del>\S(?:.*?\S)??)~~|(?<newline> *\n)`,
  ].join("|"),
  "gs",
);

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const { escaped, code, label, target, bare, newline, del, em, em2, strong, strong2 } = match.groups;
    if (match.index > at) nodes.push(text.slice(at, match.index));
    at = match.index + match[0].length;
    if (escaped) nodes.push(escaped);
    else if (code !== undefined) nodes.push(make("code", {}, code));
    else if (target !== undefined) nodes.push(SAFE_LINK.test(target) ? link(target, inline(label)) : match[0]);
    else if (bare) nodes.push(link(bare, [bare]));
    else if (newline) nodes.push(make("br"));
    else nodes.push(make(del ? "del" : em || em2 ? "em" : "strong", {}, ...inline(del || em || em2 || strong || strong2)));
  }
  return [...nodes, text.slice(at)];
}

const link = (target, children) => make("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, ...children);
