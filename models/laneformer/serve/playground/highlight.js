// Colours of code, line by line, so that a block that streams is never painted twice. One set of words for all
// languages: a word that is a keyword elsewhere may be coloured, which harms less than twenty tables.

const WORDS = new Set(
  `abstract and as assert async await auto bool break byte case catch chan char class const constexpr continue crate def default defer
  delete del do done double elif else enum esac except export extends extern False false fi final finally float fn for from func function global go
  if impl implements import in inline instanceof int interface is lambda let local long loop match mod move mut namespace new nil None nonlocal
  not null nullptr or override package pass private protected pub public raise range return self Self short signed sizeof static struct super
  switch template then this throw throws trait True true try type typedef typename typeof undefined union unsafe unsigned use using var
  virtual void volatile where while with yield size_t i32 i64 u8 u32 u64 usize f32 f64 string number boolean`.split(/\s+/),
);
const SQL = new Set("select from where group by order having join left right inner outer on as insert into values update set delete create table index view primary key foreign references not null and or in like limit offset distinct union all case when then else end is".split(" "));
const HASH = /^(py|python|python3|rb|ruby|sh|bash|zsh|shell|console|ya?ml|toml|r|perl|make(file)?|dockerfile)$/i;
const PLAIN = /^(|text|txt|plain|plaintext|output|md|markdown|html?|xml|css|diff)$/i;  // not painted

/** A function from a line of this language to nodes; it remembers comments and strings that go over several lines. */
export function highlighter(language) {
  if (PLAIN.test(language)) return (line) => [line];
  const sql = /sql/i.test(language), hash = HASH.test(language), python = /^py/i.test(language);
  const comment = hash ? "(?<!\\S)#.*" : sql ? "--.*" : "//.*";
  const opening = python ? `"""|'''` : hash ? "(?!)" : "/\\*|`";
  const token = new RegExp(
    `(?<comment>${comment})|(?<open>${opening})|(?<string>"(?:\\\\.|[^"\\\\])*"?|'(?:\\\\.|[^'\\\\])*'?)` +
      "|(?<number>\\b(?:0x[\\da-f]+|\\d[\\d_]*\\.?\\d*(?:e[+-]?\\d+)?)\\w*)|(?<word>[a-z_$][\\w$]*)", "gi");
  const known = (word) => (sql ? SQL.has(word.toLowerCase()) : WORDS.has(word));
  let until = null;  // what ends the comment or string that an earlier line has begun
  return (line) => {
    const nodes = [];
    let at = 0;
    const add = (end, style) => {
      if (end > at) nodes.push(style ? span(style, line.slice(at, end)) : line.slice(at, end));
      at = end;
    };
    const close = (from) => {
      const end = line.indexOf(until, from), style = until === "*/" ? "comment" : "string";
      add(end < 0 ? line.length : end + until.length, style);
      if (end >= 0) until = null;
    };
    if (until) close(0);
    for (let match; at < line.length && ((token.lastIndex = at), (match = token.exec(line))); ) {
      const { comment, open, string, number, word } = match.groups, end = match.index + match[0].length;
      add(match.index);
      if (open) (until = open === "/*" ? "*/" : open), close(end);
      else add(end, comment ? "comment" : string ? "string" : number ? "number" : known(word) ? "keyword" : line[end] === "(" ? "call" : "");
    }
    add(line.length);
    return nodes;
  };
}

function span(style, text) {
  const element = document.createElement("span");
  element.className = style;
  element.textContent = text;
  return element;
}
