// Shows another plan of the page's JSON when the reader changes a choice.
const { choices, given, gpu, colours, label, width, row } = JSON.parse(
  document.getElementById("plans").textContent);
const main = document.querySelector("main"), initial = main.innerHTML;
const keys = Object.keys(choices).map((key) => key.split(","));
const names = ["sequence length", "rows of a micro-batch", "recompute"];
const selects = names.map((name, i) => {
  const select = document.createElement("select"), box = document.createElement("label");
  for (const value of new Set(keys.map((key) => key[i]))) select.add(new Option(value));
  select.value = given.split(",")[i];
  select.onchange = show;
  box.append(name + " ", select, " ");
  document.getElementById("controls").append(box);
  return select;
});

function show() {
  const key = selects.map((select) => select.value).join(",");
  main.innerHTML = initial;
  if (key === given) return;
  const { line, ranks } = choices[key] ?? { line: "not a valid choice", ranks: [] };
  const [svg, legend] = main.querySelectorAll("svg, svg + p");
  main.querySelector("p").textContent = line;
  main.querySelector("section").remove(); // the given plan's step
  for (const bar of svg.querySelectorAll("rect")) bar.remove();
  const sum = (kinds) => Object.values(kinds).reduce((a, b) => a + b, 0);
  const scale = width / Math.max(gpu, ...ranks.map(sum)), x = label + gpu * scale;
  svg.querySelector("path").setAttribute("d", `M${x} 0V${svg.getAttribute("height")}`);
  ranks.forEach((kinds, i) => {
    let start = label;
    for (const [kind, size] of Object.entries(kinds)) {
      svg.insertAdjacentHTML("beforeend", `<rect x="${start}" y="${i * row + 1}"
        width="${size * scale}" height="${row - 2}" fill="${colours[kind]}">
        <title>${kind}: ${(size / 1e9).toFixed(2)} GB</title></rect>`);
      start += size * scale;
    }
  });
  legend.innerHTML = [...new Set(ranks.flatMap(Object.keys))].map((kind) =>
    `<i style="background:${colours[kind]}"></i> ${kind}`).join(" &nbsp; ");
}
