// `draw` draws every chart from the JSON beside it; `update` swaps in a newer <main> and keeps the elements of the charts,
// with their zoom and the chosen axis
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
