// Opens a page in headless Chromium and prints what is on the screen, as JSON: node page.mjs FILE
import chromium from "@sparticuz/chromium";
import { pathToFileURL } from "node:url";
import { chromium as browsers } from "playwright-core";

const executablePath = await chromium.executablePath();
const browser = await browsers.launch({ executablePath, args: chromium.args });
const page = await browser.newPage({ viewport: { width: 1280, height: 900 } });
const problems = [], requests = [];
page.on("console", (message) => problems.push(message.text()));
page.on("pageerror", (error) => problems.push(error.message));
page.on("request", (request) => requests.push(request.url()));
await page.goto(pathToFileURL(process.argv[2]).href);
const found = await page.evaluate(() => {
  const box = (element) => {
    const { x, y, width, height } = element.getBoundingClientRect();
    return { x, y, width, height };
  };
  const shown = (rect) => ({ ...box(rect), color: getComputedStyle(rect).fill, title: rect.textContent });
  const pictures = [...document.querySelectorAll("svg")].map((svg) => ({
    ...box(svg),
    rects: [...svg.querySelectorAll("rect")].map(shown),
    texts: [...svg.querySelectorAll("text")].map((text) => ({ ...box(text), text: text.textContent })),
  }));
  const { scrollWidth, clientWidth } = document.documentElement;
  return { title: document.title, text: document.body.innerText, pictures, scrollWidth, clientWidth };
});
console.log(JSON.stringify({ ...found, problems, requests }));
await browser.close();
