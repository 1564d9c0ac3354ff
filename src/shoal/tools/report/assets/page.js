
// The report: its figures are in the page.

const figures = JSON.parse(document.getElementById("figures").textContent);
const charts = [...document.querySelectorAll(".chart")].map((place) => {
  const canvas = el("canvas");
  place.append(canvas);
  const chart = new Chart(canvas);
  chart.figure = figures[place.dataset.figure];
  return chart;
});
const drawAll = (scale) => charts.forEach((chart) => chart.draw(chart.figure, scale));

document.getElementById("rank")?.addEventListener("change", (event) => {
  document.querySelector("#steps canvas").chart.draw(figures[event.target.value]);
});
// Printed in the light colours, and with three pixels for one: paper shows more than a screen.
function print(is) {
  document.documentElement.classList.toggle("printing", is);
  drawAll(is ? 3 : undefined);
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
addEventListener("resize", () => drawAll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
drawAll();
