"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const narrow = window.innerWidth < 560;
  const axis = { gridcolor: colour("--rule"), linecolor: colour("--rule"), zerolinecolor: colour("--rule"), automargin: true };
  return {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
    margin: { l: 8, r: 8, t: 8, b: 8 },
    legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0, traceorder: "normal" },
    hovermode: layout.barmode ? "closest" : "x unified",
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--rule"), font: { color: colour("--ink") } },
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
  };
}

function draw(place) {
  const figure = figures[place.dataset.figure];
  Plotly.react(place, figure.data, themed(figure.layout), { responsive: true, displaylogo: false, displayModeBar: false });
}

function drawAll() {
  document.querySelectorAll(".chart").forEach(draw);
}

const chosen = document.getElementById("rank");
if (chosen) {
  chosen.addEventListener("change", () => {
    const place = document.getElementById("steps");
    place.dataset.figure = chosen.value;
    draw(place);
  });
}
dark.addEventListener("change", drawAll);
drawAll();
