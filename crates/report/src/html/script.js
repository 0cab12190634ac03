"use strict";
// Shows the values at the pointer's time in every plot's legend.
(() => {
  const source = document.getElementById("numbers");
  if (!source) return;
  const { at, end, span, width, values } = JSON.parse(source.textContent);
  const plots = [...document.querySelectorAll("figure.plot")].map((figure, index) => ({
    figure,
    svg: figure.querySelector("svg"),
    cross: figure.querySelector(".cross"),
    when: figure.querySelector(".when"),
    mode: figure.querySelector(".mode"),
    shown: [...figure.querySelectorAll(".legend b")],
    unit: figure.dataset.unit,
    series: values[index],
  }));

  const bytes = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (count >= 999.5 && unit < 4) { count /= 1024; unit += 1; }
    const digits = unit === 0 || count >= 99.95 ? 0 : count >= 9.995 ? 1 : 2;
    return `${count.toFixed(digits)} ${units[unit]}`;
  };
  const shown = (plot, value) =>
    plot.unit === "%" ? `${value} %` : bytes(value) + plot.unit;
  const time = (s) => s < 1 ? `${Math.round(s * 1000)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`;

  const nearest = (t) => {
    let low = 0, high = at.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (at[middle] < t) low = middle; else high = middle;
    }
    return t - at[low] < at[high] - t ? low : high;
  };

  const read = (svg, clientX) => {
    const box = svg.getBoundingClientRect();
    const x = (clientX - box.left) / box.width * width;
    const n = nearest((x - span[0]) / (span[1] - span[0]) * end);
    const place = span[0] + at[n] / end * (span[1] - span[0]);
    for (const plot of plots) {
      plot.figure.classList.add("reading");
      plot.cross.setAttribute("x1", place);
      plot.cross.setAttribute("x2", place);
      plot.when.setAttribute("x", Math.min(Math.max(place, span[0] + 20), span[1] - 20));
      plot.when.textContent = time(at[n]);
      plot.shown.forEach((b, k) => { b.textContent = shown(plot, plot.series[k][n]); });
      if (plot.mode) plot.mode.textContent = `at ${time(at[n])}`;
    }
  };
  const rest = () => {
    for (const plot of plots) {
      plot.figure.classList.remove("reading");
      plot.shown.forEach((b) => { b.textContent = b.dataset.rest; });
      if (plot.mode) plot.mode.textContent = "peak";
    }
  };
  for (const { svg } of plots) {
    svg.addEventListener("pointermove", (event) => read(svg, event.clientX));
    svg.addEventListener("pointerleave", rest);
  }
})();
