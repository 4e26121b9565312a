// Draws every chart of the page from the JSON beside it: panels over one axis of x, each with its curves. The state
// of a chart is what its reader chose, hid and zoomed to.
const CONFIG = {responsive: true, displayModeBar: false, doubleClick: false};
const NEUTRAL = '#8a94a6', BAD = '#d93a4e';
const TITLE = 46, FOOT = 58;  // px above each panel and below the last one
const LABELLED = 16;  // more restarts than this have lines without labels
const MARKED = 100;  // more points than this are a line without marks
const STEEP = 20;  // of a curve of more values the first 1/16 of x is early: there a loss falls steeply
const nth = (letter, i) => letter + (i ? i + 1 : '');  // plotly's names: x, x2, ...
const axisOf = (letter, i) => `${letter}axis${i ? i + 1 : ''}`;
const milliseconds = x => typeof x === 'string' ? Date.parse(x.replace(' ', 'T') + 'Z') : x;  // plotly zooms dates as text

function traceOf(curve, chart, state, grid) {
  const {y} = curve, x = curve.x[state.axis];
  // a line alone gives a value without neighbours no pixel
  const alone = y.map((v, i) => v !== null && y[i - 1] == null && y[i + 1] == null);
  const marks = Boolean(curve.symbol) && y.length <= MARKED;
  const form = chart.panels[curve.panel].form;
  const step = chart.axes.length > 1 && state.axis !== 'steps' ? '  step %{customdata:,}' : '';
  const trace = {
    x, y, name: curve.name, legendgroup: curve.group, opacity: curve.opacity ?? 1, customdata: curve.x.steps,
    xaxis: nth('x', grid ? curve.panel : 0), yaxis: nth('y', curve.panel), hovertemplate: `%{y:${form}}${step}`,
    line: {color: curve.colour, width: curve.width ?? 2, dash: curve.dash ?? 'solid'},
    mode: marks || alone.some(Boolean) ? 'lines+markers' : 'lines',
    marker: {symbol: curve.symbol ?? 'circle', color: curve.colour, size: marks ? 6 : alone.map(one => one ? 6 : 0)},
    visible: !state.off.has(curve.group),
  };
  if (curve.ends) trace.error_y = {
    type: 'data', thickness: 1, ...(y.length > MARKED ? {width: 0, color: curve.colour + '55'} : {width: 3}),
    array: curve.ends.map((end, i) => end ? Math.max(0, end[1] - y[i]) : 0),
    arrayminus: curve.ends.map((end, i) => end ? Math.max(0, y[i] - end[0]) : 0),
  };
  return trace;
}

// The range of y that shows the values without outliers, which are marked at its edges; of a logarithmic axis all.
// Of `early`, where a loss falls steeply, only what lies near the later values is shown.
function fit(early, later, {zero}, log, whole) {
  const [first, rest] = (later.length < 5 ? [[], [...early, ...later]] : [early, later])
    .map(values => values.map(v => log ? Math.log10(v) : v).sort((a, b) => a - b));
  const at = share => rest[Math.floor(share * (rest.length - 1))];
  const reach = 3 * (at(0.95) - at(0.05)), all = whole || log || rest.length < 5 || !reach;
  const typical = all ? rest : rest.filter(v => v <= at(0.95) + reach && v >= at(0.05) - reach);
  const [bottom, highest] = [typical[0], typical[typical.length - 1]], near = 0.25 * (highest - bottom);
  const inside = first.filter(v => whole || log || v <= highest + near && v >= bottom - near);
  const top = Math.max(highest, ...inside), low = Math.min(bottom, ...inside, ...zero && !log ? [0] : []);
  const margin = 0.05 * (top - low) || 0.05 * Math.abs(top) || 0.1;
  return [low && low - margin, top + margin];
}

// Where the early part of long curves ends; a reader's zoom has none.
function earlyEnd(curves, state) {
  if (state.x || !curves.some(({x}) => x.length > STEEP)) return -Infinity;
  const ends = curves.flatMap(({x}) => x.length ? [x[0], x[x.length - 1]] : []);
  return Math.min(...ends) + (Math.max(...ends) - Math.min(...ends)) / 16;
}

function fitAxes(chart, data, layout, state) {
  const [from, to] = state.x ?? [-Infinity, Infinity], marks = [];
  chart.panels.forEach((panel, i) => {
    const name = axisOf('y', i), log = layout[name].type === 'log';
    const curves = data.filter(t => t.yaxis === nth('y', i) && t.visible);
    const end = chart.categories ? -Infinity : earlyEnd(curves, state);
    const early = [], later = (chart.levels ?? []).filter(level => level.panel === i).map(level => level.y);
    const places = curves.map(t => [...t.y.keys()].filter(
      k => t.y[k] !== null && (chart.categories || t.x[k] >= from && t.x[k] <= to)));
    curves.forEach((t, c) => places[c].forEach(k => {
      const ends = t.error_y ? [t.y[k] - t.error_y.arrayminus[k], t.y[k] + t.error_y.array[k]] : [];
      (t.x[k] < end ? early : later).push(...[t.y[k], ...ends].filter(v => !log || v > 0));
    }));
    if (!early.length && !later.length) return;
    const range = layout[name].range = state.y[name] ? [...state.y[name]] : fit(early, later, panel, log, state.whole);
    const [bottom, top] = log ? range.map(v => 10 ** v) : range;
    curves.forEach((t, c) => {
      // a curve that begins beyond the axis is seen to enter it; what leaves it later has a mark
      const beyond = places[c].filter(k => !(t.x[k] < end) && (t.y[k] > top || t.y[k] < bottom));
      if (beyond.length) marks.push(marksOf(t, beyond, bottom, top));
    });
  });
  data.push(...marks);
}

// Triangles at the edge of an axis for the points of a curve that lie beyond it.
function marksOf({xaxis, yaxis, name, line, x, y}, places, bottom, top) {
  const above = places.map(k => y[k] > top);
  return {
    x: places.map(k => x[k]), y: above.map(up => up ? top : bottom), xaxis, yaxis, name, mode: 'markers',
    text: places.map((k, i) => `${above[i] ? 'above' : 'below'} the axis: ${y[k].toPrecision(4)}`),
    hovertemplate: '%{text}', cliponaxis: false, visible: true,
    marker: {symbol: above.map(up => up ? 'triangle-up' : 'triangle-down'), size: 8, color: line.color},
  };
}

function xaxisOf(chart, state, domain, anchor) {
  const axis = {
    domain, anchor, zeroline: false, exponentformat: 'SI', nticks: chart.columns > 1 ? 3 : 8, type: 'linear',
    hoverformat: '.4s',
  };
  if (state.axis === 'time') Object.assign(axis, {type: 'date', hoverformat: ''});
  if (chart.categories) Object.assign(axis, {type: 'category', categoryarray: chart.categories});
  if (state.x) axis.range = state.axis === 'time' ? state.x.map(x => new Date(x).toISOString().slice(0, -1)) : [...state.x];
  if (chart.columns > 1) axis.matches = anchor === 'y' ? undefined : 'x';
  else axis.title = {text: state.axis + (chart.phases ? ', all phases' : ''), font: {size: 12}};
  return axis;
}

function layoutOf(chart, state, width) {
  const grid = chart.columns > 1, columns = grid && width < 600 ? 2 : chart.columns;
  const heights = [];  // of the rows of panels
  chart.panels.forEach(({height}, i) => heights[Math.floor(i / columns)] = height + TITLE);
  const total = heights.reduce((a, b) => a + b), above = chart.phases ? 26 : 4;
  const layout = {
    height: total + above + FOOT, margin: {l: 50, r: 12, t: above, b: FOOT}, showlegend: false,
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', hoverlabel: {namelength: -1},
    hovermode: grid ? 'closest' : 'x unified', hoversubplots: 'axis', annotations: [], shapes: [],
    font: {size: 12, color: NEUTRAL, family: getComputedStyle(document.body).fontFamily},
  };
  const gap = width < 600 ? 0.1 : 0.035;  // for the figures of y
  let below = 0;
  chart.panels.forEach((panel, i) => {
    const row = Math.floor(i / columns), column = i % columns;
    if (!column) below += heights[row];
    const low = 1 - below / total, domain = [low, low + panel.height / total];
    const left = column / columns + (column ? gap : 0);
    layout[axisOf('y', i)] = {
      domain, anchor: nth('x', grid ? i : 0), nticks: panel.height > 150 ? 7 : 3, zeroline: false, exponentformat: 'SI',
      tickformat: panel.form.endsWith('%') ? '.0%' : '', type: panel.log && state.scale === 'log' ? 'log' : 'linear',
    };
    if (grid) layout[axisOf('x', i)] = xaxisOf(chart, state, [left, (column + 1) / columns], nth('y', i));
    const long = panel.title.length + panel.unit.length > 44;
    const unit = width < 600 && long ? '' : panel.unit;
    layout.annotations.push({
      x: left, y: domain[1], xref: 'paper', yref: 'paper', xanchor: 'left', yanchor: 'bottom', yshift: 3,
      showarrow: false, text: `<b>${panel.title}</b>  ${unit}`, font: {size: grid && width < 600 ? 10 : 12},
    });
  });
  if (!grid) layout.xaxis = xaxisOf(chart, state, [0, 1], nth('y', chart.panels.length - 1));
  addMarks(chart, layout, state.axis);
  return layout;
}

// phases as shades, restarts and published values as lines
function addMarks({phases, restarts, levels, columns}, layout, axis) {
  const label = (x, text, more) => layout.annotations.push({
    x, y: 1, yref: 'paper', yanchor: 'bottom', xanchor: 'left', showarrow: false, text, ...more,
  });
  const shape = more => layout.shapes.push({type: 'line', layer: 'below', yref: 'paper', y0: 0, y1: 1, ...more});
  for (const {name, colour, x} of phases ?? []) {
    const [x0, x1] = x[axis];
    shape({type: 'rect', x0, x1, fillcolor: colour + '14', line: {width: 0}});
    label(x0, `<b>${name.replaceAll('<', '&lt;')}</b>`, {yshift: 6});
  }
  (restarts?.x[axis] ?? []).forEach((x, i) => {
    shape({x0: x, x1: x, line: {color: NEUTRAL, width: 1, dash: 'dot'}, opacity: 0.5});
    if (restarts.labels.length <= LABELLED) label(x, restarts.labels[i], {font: {size: 10}, yshift: -14});
  });
  for (const {panel, y, label: text} of levels ?? []) {
    const at = {xref: `${nth('x', columns > 1 ? panel : 0)} domain`, yref: nth('y', panel)};
    shape({x0: 0, x1: 1, y0: y, y1: y, ...at, line: {color: NEUTRAL, width: 1, dash: 'dash'}});
    if (text) label(0, text, {...at, y, font: {size: 11}});
  }
}

// events are marks above the first panel, on an axis of their own
function addEvents({events, panels}, data, layout, axis) {
  if (!events?.length) return;
  const own = panels.length, height = layout.height - layout.margin.t - layout.margin.b;
  layout[axisOf('y', own)] = {domain: [1 - 30 / height, 1 - 12 / height], range: [0, 1], visible: false, fixedrange: true};
  data.push({
    x: events.map(event => event.x[axis][0]), y: events.map(() => 0.5), text: events.map(event => event.text),
    mode: 'markers', yaxis: nth('y', own), cliponaxis: false, hovertemplate: '%{text}<extra></extra>',
    marker: {symbol: 'triangle-down', size: 9, color: events.map(event => event.trouble ? BAD : NEUTRAL)},
  });
}

async function render(place) {
  const {chart, state} = place, layout = layoutOf(chart, state, place.clientWidth);
  const data = chart.curves.map(curve => traceOf(curve, chart, state, chart.columns > 1));
  fitAxes(chart, data, layout, state);
  addEvents(chart, data, layout, state.axis);
  place.parentElement.style.height = `${layout.height}px`;
  await Plotly.react(place, data, layout, CONFIG);
  place.listens ??= listen(place);
  for (const button of place.closest('.figure').querySelectorAll('button[aria-pressed]')) {
    const {choice, option, group} = button.dataset;
    button.setAttribute('aria-pressed', choice ? state[choice] === option : !state.off.has(group));
  }
}
const fresh = chart => ({axis: chart.axes[0], scale: 'linear', off: new Set(), x: null, y: {}, whole: false});

function listen(place) {
  place.on('plotly_relayout', change => {
    const ranges = {};
    for (const [path, value] of Object.entries(change)) {
      const [, axis, end] = path.match(/^([xy]axis\d*)\.range(?:\[(\d)\])?$/) ?? [];
      if (axis) end ? (ranges[axis] ??= [])[end] = value : ranges[axis] = value;
    }
    const x = Object.keys(ranges).find(axis => axis.startsWith('x'));
    if (x) Object.assign(place.state, {x: ranges[x].map(milliseconds), y: {}});
    for (const [axis, range] of Object.entries(ranges)) if (axis.startsWith('y')) place.state.y[axis] = range;
    if (Object.keys(ranges).length) render(place);
  });
  place.on('plotly_doubleclick', () => press(place, {act: 'reset'}));
  return true;
}

function press(place, {choice, option, group, act}, twice = false) {
  const {chart, state} = place;
  if (choice) Object.assign(state, {[choice]: option, y: {}}, choice === 'axis' ? {x: null} : {});
  else if (group !== undefined && twice) {  // this one alone, or again all
    const others = chart.curves.map(curve => curve.group).filter(other => other !== group);
    state.off = new Set(others.every(other => state.off.has(other)) ? [] : others);
  } else if (group !== undefined) state.off.delete(group) || state.off.add(group);
  else if (act === 'csv') return download(place);
  else Object.assign(state, {x: null, y: {}, whole: act === 'everything'});
  return render(place);
}

function csv({panels, curves, axes}) {
  const quoted = text => `"${String(text ?? '').replaceAll('"', '""')}"`;
  const place = (axis, value) => axis === 'time' && value !== null ? new Date(value).toISOString() : value;
  const lines = curves.flatMap(({panel, name, group, x, y, ends}) => y.map((value, i) => [
    ...[panels[panel].title, name, group].map(quoted), ...axes.map(axis => place(axis, x[axis][i])), value,
    ...(ends?.[i] ?? ['', '']),
  ]));
  const head = ['panel', 'curve', 'group', ...axes.map(quoted), 'value', 'low', 'high'];
  return [head, ...lines].map(line => line.join(',') + '\n').join('');
}
function download(place) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([csv(place.chart)], {type: 'text/csv'}));
  link.download = `${place.id}.csv`;
  link.click();
}

function element(kind, attributes, ...inside) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}
const ACTS = {
  everything: 'fit y to all that is visible', reset: 'as at first; so does a double click',
  csv: 'download the data of this chart',
};
function controls({panels, curves, axes}) {
  const groups = new Map();
  for (const curve of curves) if (!groups.has(curve.group)) groups.set(curve.group, curve);
  const stroke = ({colour, dash}) => `3px ${{dash: 'dashed', dot: 'dotted'}[dash] ?? 'solid'} ${colour}`;
  const legend = [...groups].map(([group, curve]) => element('button', {class: 'chip', 'data-group': group,
    'aria-pressed': true}, element('i', {style: `border-top:${stroke(curve)}`}), group));
  const row = buttons => buttons.length > 1 ? [element('span', {class: 'choice'}, ...buttons)] : [];
  const choice = (name, options) => row(options.map(
    option => element('button', {'data-choice': name, 'data-option': option, 'aria-pressed': true}, option)));
  return [
    element('span', {class: 'chips'}, ...(legend.length > 1 ? legend : [])),
    element('span', {class: 'controls'}, ...choice('axis', axes),
      ...choice('scale', panels.some(panel => panel.log) ? ['linear', 'log'] : []),
      ...row(Object.entries(ACTS).map(([act, title]) => element('button', {'data-act': act, title}, act)))),
  ];
}

document.addEventListener('toggle', ({target}) => {
  for (const place of target.open ? target.querySelectorAll('.chart > div') : []) render(place);
}, true);
document.addEventListener('click', ({target, detail}) => {
  const button = target.closest('.figure button');
  const place = button?.closest('.figure').querySelector('.chart > div');
  if (button) press(place, button.dataset, detail === 2);
});
(async () => {
  for (const chart of document.querySelectorAll('.chart')) {
    const place = chart.firstElementChild;
    place.chart = JSON.parse(chart.lastElementChild.textContent);
    place.state = fresh(place.chart);
    place.closest('.figure').querySelector('.tools').replaceChildren(...controls(place.chart));
    if (!place.closest('details:not([open])')) await render(place);  // else once it is unfolded
  }
  document.body.dataset.drawn = '';
})();
