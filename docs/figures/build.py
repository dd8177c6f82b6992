"""Put the recorded data and the shared style and script into the pages: one HTML file each, which needs nothing else.

    python docs/figures/build.py          writes docs/figures/*.html

parts/NAME.html is a page with three marks, `<!-- style -->`, `<!-- data -->` and `<!-- script -->`; data/NAME.json is
recorded by benchmarks/figures.py. No other packages are needed.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in (HERE / "parts").glob("*.html"))


def build(name: str) -> str:
    parts = HERE / "parts"
    page = (parts / f"{name}.html").read_text()
    # a string of the data must not end the element that it lies in
    data = (HERE / "data" / f"{name}.json").read_text().strip().replace("</", "<\\/")
    for mark, text in (
        # without an icon of its own a page makes the browser ask the site for /favicon.ico
        ("style", f'<link rel="icon" href="data:,">\n<style>\n{(parts / "base.css").read_text()}</style>'),
        ("data", f'<script type="application/json" id="data">{data}</script>'),
        ("script", f"<script>\n{(parts / 'base.js').read_text()}</script>"),
    ):
        before, found, after = page.partition(f"<!-- {mark} -->")
        if not found:
            raise SystemExit(f"parts/{name}.html has no <!-- {mark} -->")
        page = before + text + after
    return page


def main() -> None:
    for name in names():
        path = HERE / f"{name}.html"
        path.write_text(build(name))
        print(f"{path.relative_to(HERE.parents[1])}  {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
