"""The page's one style sheet: light and dark by the reader's setting, one column on a phone."""

from __future__ import annotations

_TONES = ("before", "after", "other", "rollout", "learn", "sync", "data", "target", "pack", "rest")
_BOXES = ("truth", "missed", "hit", "class", "spurious")

_BASE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#16181d;--soft:#666d78;--line:#e6e8ec;--wash:#f6f7f9;
--c-before:#9aa2af;--c-after:#2f62d9;--c-other:#c2762b;--c-rollout:#2f62d9;--c-learn:#e3a13b;--c-sync:#c4527a;
--c-data:#63a375;--c-target:#8a74c9;--c-pack:#4fa8b8;--c-rest:#c5cad3;--good:#1a7f4b;--bad:#c23a3a;
--b-truth:#4cc4ff;--b-missed:#4cc4ff;--b-hit:#39d98a;--b-class:#ffb020;--b-spurious:#ff5470}
@media(prefers-color-scheme:dark){:root{--paper:#14161a;--ink:#e9ebef;--soft:#98a0ad;--line:#2a2e36;--wash:#1b1e24;
--c-before:#7d8695;--c-after:#7aa2ff;--c-other:#e39a55;--c-rollout:#7aa2ff;--c-sync:#e07ba0;--c-rest:#565d69;
--good:#4cc38a;--bad:#ff7a7a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:1200px;margin:0 auto;padding:44px 32px 72px}
h1{font-size:32px;line-height:1.2;letter-spacing:-.02em;font-weight:650;margin:2px 0 6px;overflow-wrap:anywhere}
h2{font-size:19px;letter-spacing:-.01em;font-weight:650;margin:56px 0 4px;padding-top:20px;
border-top:1px solid var(--line)}
h3{font-size:15px;font-weight:650;margin:34px 0 10px}
p{margin:0 0 12px;max-width:74ch}
.kicker,.facts,.lead{color:var(--soft)}
.kicker{font-size:13px;margin:0}
.facts{font-size:14px;margin:0;max-width:none;overflow-wrap:anywhere}
.lead{margin:0 0 20px}.absent-note{margin:22px 0 0;font-size:14px}
.verdict{font-size:20px;line-height:1.45;letter-spacing:-.01em;margin:26px 0 24px;max-width:46em}
.notes{margin:20px 0 24px;padding:12px 16px;background:var(--wash);border-radius:8px;color:var(--soft);
font-size:14px;list-style:none}
.notes li{overflow-wrap:anywhere}
.cards{margin-top:24px;display:grid;grid-template-columns:1.5fr 1.15fr 1.1fr 1.15fr;border:1px solid var(--line);
border-radius:10px;overflow:hidden;background:var(--line);gap:1px}
.card{background:var(--paper);padding:16px 20px 15px;min-width:0}
.card .name{font-size:13px;color:var(--soft)}
.card .big{font-size:29px;line-height:1.25;letter-spacing:-.02em;font-weight:600;white-space:nowrap;margin-top:2px}
.card .big s{text-decoration:none;color:var(--soft);font-weight:450}
.card .sub{font-size:13px;color:var(--soft)}
.good{color:var(--good)}.bad{color:var(--bad)}
.charts{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:30px 34px;margin-top:22px}
figure{margin:0;min-width:0}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:10px;font-size:14px;margin-bottom:6px}
figcaption b{font-weight:600}
.timeline{margin-top:34px}.wide{overflow-x:auto}.wide svg{min-width:720px}
.value{color:var(--soft);font-size:13px;white-space:nowrap}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:11px ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--soft)}
svg text.label{font-size:12px;fill:var(--ink)}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--line);stroke-width:1}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.band{opacity:.18}.whisker{stroke-width:3;stroke-linecap:round;opacity:.45}
.hit{fill:transparent}.dot{opacity:0;fill:var(--ink)}.hover:hover .dot{opacity:1}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft);margin-top:6px}
.key{display:inline-flex;align-items:center;gap:6px;white-space:nowrap}
.key i{width:10px;height:10px;border-radius:2px;flex:none}
.key i.box{width:24px;height:13px;border-radius:0}
.table{overflow-x:auto;margin-top:18px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:right;padding:7px 0 7px 22px;border-bottom:1px solid var(--line);white-space:nowrap;font-weight:400}
th{color:var(--soft);font-size:13px}
th:first-child,td:first-child{text-align:left;padding-left:0}
td small{color:var(--soft);font-size:12.5px;margin-left:6px}
.scene{min-width:0}
.scene-name{display:flex;gap:10px;font-size:13px;color:var(--soft);margin-bottom:6px;overflow-wrap:anywhere}
.scene-name b{color:var(--ink);font-weight:600}
.panels{display:flex;gap:16px}
.panel{flex:1 1 0;max-width:420px}
.panel svg{border-radius:4px;overflow:hidden;background:#22262d}
.panel figcaption{margin:5px 0 0;font-size:13px;flex-wrap:wrap;gap:0 10px}
.panel small{flex-basis:100%;font-size:12.5px;color:var(--soft)}
.scenes{display:grid;gap:26px 40px}
.small{image-rendering:pixelated}
.absent{fill:var(--wash)}
.halo{fill:none;stroke:#0b0d10;stroke-opacity:.55;stroke-width:4}
svg text.tag{font-size:11px;font-weight:600;fill:#0b0d10;text-anchor:middle}
.details details{border-top:1px solid var(--line);padding:12px 0}
.charts .table{margin-top:0}.charts th,.charts td{padding:4px 0 4px 12px;font-size:13px}
.charts th:first-child,.charts td:first-child{padding-left:0}
summary{cursor:pointer;font-weight:600;font-size:14px}
pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-x:auto;margin:10px 0 0;
color:var(--soft)}
.details{margin-top:56px}
footer{margin-top:28px;color:var(--soft);font-size:13px;max-width:80ch}
@media(max-width:980px){.charts{grid-template-columns:repeat(2,minmax(0,1fr))}.cards{grid-template-columns:1fr 1fr}}
@media(max-width:640px){main{padding:28px 18px 48px}h1{font-size:26px}.verdict{font-size:17px;margin:20px 0}
.charts{grid-template-columns:minmax(0,1fr)}.card:first-child,.card:last-child{grid-column:span 2}
.panels{gap:8px}.panels:has(.panel:nth-child(3)){flex-wrap:wrap}
.panels:has(.panel:nth-child(3)) .panel{flex:0 1 calc(50% - 4px)}h2{margin-top:42px}
.card{padding:13px 16px}th,td{padding-left:16px}}
@media(min-width:900px){.pairs{grid-template-columns:repeat(2,minmax(0,1fr))}.pairs .panels{gap:12px}}
@media print{main{max-width:none;padding:0}.scene,.chart,.card{break-inside:avoid}}
"""


def style_sheet() -> str:
    """The whole sheet; chart colours and box colours are spelled out from their names."""
    rules = [
        f".f-{t}{{fill:var(--c-{t})}}.s-{t}{{stroke:var(--c-{t})}}.b-{t}{{background:var(--c-{t})}}" for t in _TONES
    ]
    rules += [f".o-{b}{{fill:none;stroke:var(--b-{b});stroke-width:2}}.t-{b}{{fill:var(--b-{b})}}" for b in _BOXES]
    rules += [f".key i.x-{b}{{border:2px solid var(--b-{b})}}" for b in _BOXES]
    # Told apart without colour too: dashes for what is wrong, a filled box for what was missed.
    rules.append(".o-class{stroke-dasharray:7 3}.o-spurious{stroke-dasharray:2 3}.o-truth{stroke-width:1.5}")
    rules.append(".o-missed{fill:var(--b-missed);fill-opacity:.22}.key i.x-missed{background:#4cc4ff55}")
    rules.append(".key i.x-class{border-style:dashed}.key i.x-spurious{border-style:dotted}")
    return _BASE + "".join(rules)
