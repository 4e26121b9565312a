// Every chart is drawn from the JSON beside it and the state of its element: what is chosen, hidden and zoomed to.
// `layout.meta` names the choices and the layout of each option, `trace.meta` what an option changes of a trace.
// The legend has a button for each legendgroup.
const CONFIG = {responsive: true, displayModeBar: false, doubleClick: false};
const SPIKES = 400;  // more values than this are fitted without the highest 0.5 %
const STEEP = 20;  // as many values of one legend entry are fitted without their first 1/16 of x
const set = (object, changes) => {
  for (const [path, value] of Object.entries(changes ?? {})) {
    const keys = path.split('.'), last = keys.pop();
    keys.reduce((at, key) => at[key] ??= {}, object)[last] = value;
  }
};
const axes = layout => Object.keys(layout).filter(key => key.startsWith('yaxis') && layout[key].visible !== false);

// what a trace has of x that counts for its axis: all of a zoom; else, of a long curve, not its steep first part
function starts(data, whole) {
  const spans = {};
  if (!whole) for (const {legendgroup, x, visible} of data) {
    if (!x?.length || visible === false) continue;
    const span = spans[legendgroup] ??= {low: Infinity, high: -Infinity, values: 0};
    span.low = Math.min(span.low, x[0]), span.high = Math.max(span.high, x[x.length - 1]), span.values += x.length;
  }
  return ({legendgroup}) => {
    const span = spans[legendgroup];
    return span?.values >= STEEP ? span.low + (span.high - span.low) / 16 : -Infinity;
  };
}
// y ranges that show what is visible within the range of x, without the tips of spikes; whole: all of it.
// An axis that begins at zero fits by itself as long as nothing is zoomed or hidden.
function fit(data, layout, {x, whole, off}) {
  const begin = starts(data, whole || x), [from, to] = x ?? [-Infinity, Infinity];
  for (const name of axes(layout)) {
    const log = layout[name].type === 'log', values = [];
    if (layout[name].fixedrange || layout[name].rangemode === 'tozero' && !(x || whole || log || off.size)) continue;
    for (const trace of data) {
      const here = (trace.yaxis ?? 'y') === name.replace('axis', '') && trace.visible !== false;
      if (!here || !trace.x || !trace.y) continue;
      const first = Math.max(from, begin(trace));
      trace.y.forEach((y, i) => {
        if (y !== null && (y > 0 || !log) && trace.x[i] >= first && trace.x[i] <= to) values.push(log ? Math.log10(y) : y);
      });
    }
    if (!values.length) continue;
    values.sort((a, b) => a - b);
    const last = values.length - 1, top = values[whole || x || last < SPIKES ? last : Math.floor(0.995 * last)];
    const low = layout[name].rangemode === 'tozero' && !log ? Math.min(0, values[0]) : values[0];
    const margin = 0.05 * (top - low) || 0.05 * Math.abs(top) || 0.1;
    layout[name].range = [low && low - margin, top + margin];
  }
}
async function render(place) {
  const {figure, state} = place, layout = structuredClone(figure.layout), choices = layout.meta ?? {};
  const data = (state.x && place.rows || figure.data).map(trace => {
    const shown = {...trace};
    for (const [name, option] of Object.entries(state.chosen)) Object.assign(shown, trace.meta?.[name]?.[option]);
    if (state.off.has(trace.legendgroup)) shown.visible = false;
    return shown;
  });
  for (const [name, option] of Object.entries(state.chosen)) set(layout, choices[name]?.[option]);
  fit(data, layout, state);
  if (state.x) set(layout, {'xaxis.range': [...state.x]});
  for (const [name, range] of Object.entries(state.y)) layout[name].range = [...range];
  await Plotly.react(place, data, layout, CONFIG);
  place.listens ??= listen(place);
  for (const button of place.closest('.figure').querySelectorAll('button[aria-pressed]')) {
    const {choice, option, group} = button.dataset;
    button.setAttribute('aria-pressed', choice ? state.chosen[choice] === option : !state.off.has(group));
  }
}
// a served page gets the rows of the range that is zoomed to; a file has those of the whole run
async function zoomRows(place) {
  const {x, chosen} = place.state, version = document.body.dataset.version;
  const query = x && version && /^(training|machine|sources)-/.test(place.id)
    && new URLSearchParams({chart: place.id, axis: chosen.x ?? 'steps', low: x[0], high: x[1]}).toString();
  place.asked = query;
  place.rows = null;
  if (!query) return;
  const answer = await fetch(`rows.json?${query}`);
  const rows = answer.ok ? await answer.json() : null;
  if (place.asked !== query) return;  // meanwhile another zoom
  place.rows = rows;
  await render(place);
}
function reset(place) {
  Object.assign(place.state, {x: null, y: {}, whole: false});
  return render(place);
}
function zoom(place, change) {
  const ends = name => change[name + '.range'] ?? [change[name + '.range[0]'], change[name + '.range[1]']];
  const names = ['xaxis', ...axes(place.layout)].filter(name => ends(name)[0] !== undefined);
  if (names.includes('xaxis')) Object.assign(place.state, {x: ends('xaxis'), y: {}});
  for (const name of names) if (name !== 'xaxis') place.state.y[name] = ends(name);
  if (names.length) render(place);
  if (names.includes('xaxis')) zoomRows(place);
}
const ACTS = {autoscale: 'fit y to all that is visible', reset: 'as at first; so does a double click'};
const STROKES = {dash: 'dashed', dot: 'dotted'};
function button(text, attributes, ...inside) {
  const made = document.createElement('button');
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside, text);
  return made;
}
function span(kind, ...inside) {
  const made = document.createElement('span');
  made.className = kind;
  made.append(...inside);
  return made;
}
// the legend and the choices of a figure
function controls({data, layout}) {
  const groups = new Map(), choices = [];
  for (const trace of data) if (trace.legendgroup && !groups.has(trace.legendgroup)) groups.set(trace.legendgroup, trace);
  const legend = [...groups].map(([group, {line}]) => {
    const stroke = document.createElement('i');
    stroke.style.borderTop = `3px ${STROKES[line.dash] ?? 'solid'} ${line.color}`;
    return button(group, {class: 'chip', 'data-group': group, 'aria-pressed': true}, stroke);
  });
  for (const [choice, options] of Object.entries(layout.meta ?? {})) {
    const of = Object.keys(options).map(option => button(option, {'data-choice': choice, 'data-option': option, 'aria-pressed': true}));
    const label = document.createElement('small');
    label.textContent = choice;
    if (of.length > 1) choices.push(span('choice', ...choice === 'x' ? [] : [label], ...of));
  }
  if (!layout.yaxis.fixedrange) choices.push(span('choice', ...Object.entries(ACTS).map(([act, title]) => button(act, {'data-act': act, title}))));
  return [span('chips', ...legend), span('controls', ...choices)];
}
const firsts = meta => Object.fromEntries(Object.entries(meta ?? {}).map(([choice, options]) => [choice, Object.keys(options)[0]]));
async function draw(root, figures) {
  for (const chart of root.querySelectorAll('.chart')) {
    const place = chart.firstElementChild;
    place.figure = figures?.[place.id] ?? JSON.parse(chart.lastElementChild.textContent);
    place.state ??= {chosen: firsts(place.figure.layout.meta), off: new Set(), x: null, y: {}, whole: false};
    place.closest('.figure').querySelector('.tools').replaceChildren(...controls(place.figure));
    if (!place.closest('details:not([open])')) await render(place);  // else once it is unfolded
    if (place.state.x) zoomRows(place);
  }
}
// a hover shows in every chart of the run on the same axis that is in sight
function hover(place, show) {
  for (const other of place.closest('article, main').querySelectorAll('.chart > div')) {
    const {top, bottom} = other.getBoundingClientRect(), seen = bottom > 0 && top < innerHeight;
    if (other !== place && seen && other.on && place.state.chosen.x && other.state.chosen.x === place.state.chosen.x) show(other);
  }
}
function listen(place) {
  place.on('plotly_relayout', change => zoom(place, change));
  place.on('plotly_doubleclick', () => reset(place));
  place.on('plotly_hover', ({event, xvals}) => event?.isTrusted && hover(place, other => Plotly.Fx.hover(other, {xval: xvals[0]}, 'xy')));
  place.on('plotly_unhover', ({event}) => event?.isTrusted && hover(place, other => Plotly.Fx.unhover(other)));
  return true;
}
document.addEventListener('toggle', ({target}) => {
  for (const place of target.open ? target.querySelectorAll('.chart > div') : []) if (place.state) render(place);
}, true);
function press(button, twice) {
  const figure = button.closest('.figure'), place = figure.querySelector('.chart > div'), state = place.state;
  const {choice, option, group, act} = button.dataset;
  if (choice) {
    state.chosen[choice] = option;
    if (choice === 'x') state.x = null;
    state.y = {};
  } else if (group !== undefined && twice) {  // this one alone, or again all
    const others = [...figure.querySelectorAll('[data-group]')].map(each => each.dataset.group).filter(g => g !== group);
    const alone = others.every(each => state.off.has(each));
    state.off = new Set(alone ? [] : others);
  } else if (group !== undefined) {
    if (!state.off.delete(group)) state.off.add(group);
  } else if (act === 'autoscale') Object.assign(state, {y: {}, whole: true});
  else return reset(place);
  return render(place);
}
document.addEventListener('click', event => {
  const button = event.target.closest('.figure button');
  if (button) press(button, event.detail === 2 && button.dataset.group !== undefined);
});
async function update({main, figures}) {
  const fresh = document.createElement('main'), old = document.querySelector('main');
  fresh.innerHTML = main.join('');
  for (const place of fresh.querySelectorAll('.chart > div')) {
    const drawn = document.getElementById(place.id);
    if (drawn) place.replaceWith(drawn);
  }
  const folds = root => new Map([...root.querySelectorAll('details')].map(
    each => [each.closest('.part')?.id + each.firstElementChild.textContent, each]));
  const before = folds(old);
  for (const [name, each] of folds(fresh)) each.open = before.get(name)?.open ?? each.open;
  old.replaceWith(fresh);
  await draw(fresh, figures);
}
// `old` with a difference as tools.dashboard makes it; what has not changed keeps its identity, by which Plotly knows it
function patch(old, change) {
  if (!change) return old;
  if ('to' in change) return change.to;
  const fresh = Array.isArray(old) ? old.slice(0, change.size) : {...old};
  for (const [key, inner] of Object.entries(change.at)) fresh[key] = patch(old[key], inner);
  return fresh;
}
async function poll(every_ms) {
  let version = document.body.dataset.version, held = '', content;
  for (;;) {
    await new Promise(done => setTimeout(done, every_ms));
    try {
      const answer = await fetch(`data.json?version=${version}&held=${held}`);
      if (answer.status === 200) {
        const news = await answer.json();
        held = version = news.version;
        await update(content = patch(content, news.change));
      }
      document.body.classList.remove('stale');
    } catch (lost) { document.body.classList.add('stale'); }
  }
}
draw(document).then(() => document.body.dataset.drawn = '');
