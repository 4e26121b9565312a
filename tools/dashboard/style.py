"""How the dashboard's page looks and moves: its style sheet, and the few lines of script that draw and update it."""

from __future__ import annotations

FONT = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif'
# the page in two themes: everything that is not data takes its colour from here
STYLE = (
    "body { font:15px/1.5 "
    + FONT
    + """ }
:root { --page:#f6f6f3; --card:#ffffff; --ink:#1c2430; --soft:#5d6879; --line:#e6e6e0; --grid:#ecece7; --track:#eeeeea;
  --good:#1f8a5b; --warn:#b4540a; --bad:#c6283c; color-scheme:light dark }
@media (prefers-color-scheme:dark) { :root { --page:#0f1216; --card:#171b21; --ink:#e8ebf0; --soft:#97a1b2;
  --line:#252b34; --grid:#232932; --track:#232932; --good:#4cc38a; --warn:#f0a45d; --bad:#ff7585 } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); -webkit-text-size-adjust:100% }
main { max-width:1240px; margin:0 auto; padding:40px 24px 24px }
article + article, .card + article { margin-top:72px }
h1 { font-size:32px; line-height:1.15; letter-spacing:-.02em; margin:0; overflow-wrap:anywhere }
h2 { font-size:15px; font-weight:650; margin:0 0 12px }
h3, th { font-size:12px; font-weight:500; color:var(--soft); margin:0; text-align:left }
small, .facts, .caption, footer { color:var(--soft); font-size:13px }
.title { display:flex; flex-wrap:wrap; align-items:center; gap:8px 16px }
.state { font-size:13px; padding:3px 12px 3px 10px; border-radius:99px; background:var(--card);
  border:1px solid var(--line) }
.state::before { content:""; display:inline-block; width:8px; height:8px; border-radius:50%; margin-right:8px;
  background:var(--soft) }
.state.live::before, .state.done::before { background:var(--good) }
.state.live::before { box-shadow:0 0 0 4px color-mix(in srgb,var(--good) 22%,transparent) }
.facts { margin:10px 0 20px; display:flex; flex-wrap:wrap; gap:2px 20px }
.progress { display:flex; flex-wrap:wrap; gap:6px; margin-bottom:20px }
.progress > div { min-width:max-content }
.bar { background:var(--track); border-radius:4px; height:8px; overflow:hidden }
.bar i { display:block; height:100%; border-radius:4px }
.progress small { white-space:nowrap; font-variant-numeric:tabular-nums; display:block; margin-top:4px }
.progress b { color:var(--ink); font-weight:600 }
.tiles { display:grid; grid-template-columns:repeat(6,1fr); gap:1px; background:var(--line); overflow:hidden;
  border:1px solid var(--line); border-radius:14px; margin-bottom:16px }
.tiles > div { background:var(--card); padding:16px 18px }
.tiles strong { display:block; font-size:26px; line-height:1.3; font-weight:620; letter-spacing:-.02em;
  font-variant-numeric:tabular-nums }
.tiles small { font-size:12px; line-height:1.35; display:block }
.tiles strong .none { font-size:15px; line-height:34px; font-weight:400; letter-spacing:0; display:block }
.none { color:var(--soft); font-style:italic }
.card { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:20px 22px; margin-bottom:16px;
  min-width:0 }
.caption { margin:12px 0 0 }
.pair { display:grid; grid-template-columns:1fr 1fr; gap:0 16px }
.stack .bits { display:grid; grid-template-columns:1fr 1fr; gap:0 40px; align-items:center }
.stack .low { margin:0 }
.chips { margin:0 0 4px; display:flex; flex-wrap:wrap; gap:2px 16px; font-size:13px; color:var(--soft) }
.chip i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:7px }
.chip i.line { width:26px; height:0; border-radius:0; vertical-align:middle }
.row { display:grid; grid-template-columns:minmax(84px,150px) 1fr 64px; gap:14px; align-items:center; padding:5px 0 }
.row span { line-height:1.25; overflow-wrap:anywhere } .row small { display:block; font-size:12px }
.row .bar { height:14px } .row b { text-align:right; font-weight:600; font-variant-numeric:tabular-nums }
.rows p { margin:0 0 10px; font-size:13px; color:var(--soft) }
.scroll { overflow-x:auto; margin:0 -22px; padding:0 22px } .scroll + .scroll { margin-top:22px }
table { border-collapse:collapse; width:100%; font-size:13px; font-variant-numeric:tabular-nums }
td, th { padding:6px 20px 6px 0; border-bottom:1px solid var(--line); white-space:nowrap; vertical-align:top }
tr:last-child td { border-bottom:0 }
code { font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace }
.warnings { margin:0 0 16px; padding:12px 16px 12px 34px; border-radius:14px; font-size:13px; color:var(--warn);
  border:1px solid color-mix(in srgb,var(--warn) 40%,transparent) }
.chart { width:100%; min-width:0 } .tall { height:880px } .middle { height:380px }
.many { height:980px } .low { height:260px; margin-top:16px }
.chart > div { height:100% } body.stale .state.live::before { background:var(--warn) }
.chart text { fill:var(--soft) !important } .chart text.annotation-text { fill:var(--ink) !important }
.chart .gridlayer path { stroke:var(--grid) !important }
.chart .hoverlayer .bg { fill:var(--card) !important; fill-opacity:.96 !important; stroke:var(--line) !important;
  stroke-opacity:1 !important } .chart .hoverlayer text { fill:var(--ink) !important }
.chart .hoverlayer .hovertext path { fill:var(--card) !important; stroke:var(--line) !important }
.chart .spikeline { stroke:var(--soft) !important; stroke-width:1px !important; opacity:.5 }
.chart .updatemenu-button rect { fill:var(--card) !important; stroke:var(--line) !important }
.facts-of { display:grid; grid-template-columns:repeat(auto-fill,minmax(150px,1fr)); gap:16px; margin:22px 0 6px }
.facts-of dt { font-size:12px; color:var(--soft) } .facts-of dd { margin:0; font-size:17px; font-weight:600;
  font-variant-numeric:tabular-nums } .scale { display:flex; justify-content:space-between; margin-top:6px }
.missing { color:var(--bad) }
.core b { color:var(--ink) } .core b.missing { color:var(--bad) }
.card > h3 { margin:22px 0 8px; color:var(--ink) } .heat { height:560px } .save { margin:14px 0 0; font-size:13px }
.save a { color:inherit }
.smalls { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(165px,42%),1fr)); gap:14px 20px;
  margin-bottom:6px }
.smalls figure { margin:0; min-width:0 } .smalls figcaption { display:flex; justify-content:space-between; gap:8px;
  font-size:12px; overflow-wrap:anywhere; line-height:1.3; align-items:end; min-height:32px } .smalls b { flex:none }
.smalls svg { display:block; width:100%; background:var(--page); border-radius:6px; margin:4px 0 2px }
.smalls svg polyline { stroke-width:1.6; vector-effect:non-scaling-stroke } .smalls small { font-size:12px }
.smalls .base { stroke:var(--soft); vector-effect:non-scaling-stroke; stroke-dasharray:2 3 }
.smalls .base.v2 { stroke-dasharray:6 3 }
.smalls .missing small { display:-webkit-box; -webkit-box-orient:vertical; -webkit-line-clamp:4; overflow:hidden;
  overflow-wrap:anywhere }
.bullet .bar { height:28px; border-radius:7px; position:relative }
.bullet u { position:absolute; top:0; bottom:0; width:3px; margin-left:-1.5px; background:var(--card) }
 .bullet .bar i { border-radius:7px }
.bullet { margin-bottom:26px } .bullet h3 { margin-bottom:8px }
footer { text-align:center; padding:12px 0 }
@media (max-width:1000px) { .tiles { grid-template-columns:repeat(3,1fr) }
  .pair, .stack .bits { grid-template-columns:1fr } }
@media (max-width:600px) { main { padding:24px 12px } h1 { font-size:26px } .tiles { grid-template-columns:1fr 1fr }
  .card { padding:16px 14px } .scroll { margin:0 -14px; padding:0 14px } .tall { height:760px }
  .heat { min-width:600px } .tiles > div { padding:12px 14px } .tiles strong { font-size:22px } .row { gap:10px } }
/* a finger scrolls the page; it must not be caught by a chart as tall as the screen */
@media (hover:none) and (pointer:coarse) { .chart rect.drag { pointer-events:none !important } }
"""
)
# draws every chart from the text beside it; `update` takes a newer <main> and leaves the charts where they are, with
# their zoom and the chosen axis
SCRIPT = """
const CONFIG = {responsive: true, displayModeBar: false};
async function draw(root) {
  for (const text of root.querySelectorAll('.chart > script')) {
    const place = document.getElementById(text.previousElementSibling.id), figure = JSON.parse(text.textContent);
    const before = place.layout, active = before?.updatemenus?.[0]?.active ?? 0;
    const range = before?.xaxis?.autorange === false ? before.xaxis.range.slice() : null;
    await Plotly.react(place, figure.data, figure.layout, CONFIG);
    if (active) {
      await Plotly.update(place, ...structuredClone(place.layout.updatemenus[0].buttons[active].args));
      await Plotly.relayout(place, {'updatemenus[0].active': active});
    }
    if (range) await Plotly.relayout(place, {'xaxis.range': range});
  }
}
async function update(text) {
  const fresh = document.createElement('main'), old = document.querySelector('main');
  fresh.innerHTML = text;
  for (const place of fresh.querySelectorAll('.chart > div')) {
    const drawn = document.getElementById(place.id);
    if (drawn) place.replaceWith(drawn);
  }
  old.replaceWith(fresh);
  await draw(fresh);
}
async function poll(every_ms) {
  let version = document.body.dataset.version;
  for (;;) {
    await new Promise(done => setTimeout(done, every_ms));
    try {
      const answer = await fetch('data.json?version=' + version);
      if (answer.status === 200) { const news = await answer.json(); version = news.version; await update(news.main); }
      document.body.classList.remove('stale');
    } catch (lost) { document.body.classList.add('stale'); }
  }
}
draw(document);
"""
