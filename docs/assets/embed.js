// Figures in frames: as high as their content, and in the site's light or dark scheme.
const frames = () => [...document.querySelectorAll("iframe.figure")];
const tell = (frame, ask = false) => frame.contentWindow?.postMessage(
  {theme: document.body.getAttribute("data-md-color-scheme") === "slate" ? "dark" : "light", ask}, "*");
window.addEventListener("message", event => {
  const frame = frames().find(one => one.contentWindow === event.source);
  if (!frame || !(event.data?.height > 0)) return;
  frame.style.height = `${Math.min(event.data.height, 6000)}px`;
  tell(frame);
});
// a figure may have told its height before this script was there to hear it
for (const frame of frames()) {
  frame.addEventListener("load", () => tell(frame, true));
  tell(frame, true);
}
new MutationObserver(() => frames().forEach(frame => tell(frame))).observe(document.body, {attributes: true, attributeFilter: ["data-md-color-scheme"]});
