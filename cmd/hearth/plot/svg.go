package plot

import (
	"fmt"
	"html"
	"math"
	"strings"
	"time"

	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/units"
)

// Measures of the drawing in pixels.
const (
	svgWidth   = 860.0
	svgLeft    = 84.0
	svgRight   = 20.0
	svgTop     = 100.0
	svgGap     = 44.0
	tallPanel  = 210.0
	smallPanel = 90.0
)

// svgStyle has colours that people who see colours differently tell apart, on
// light and on dark. It does without variables, which not every program knows.
const svgStyle = `<style>
text{font:12px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}
.paper{fill:#ffffff}.dim{fill:#59636e}.grid{stroke:#d1d9e0}.axis{stroke:#59636e}
.line{fill:none;stroke:#1f2328;stroke-width:1.6}.before{stroke:#59636e;stroke-dasharray:5 4}
.weights{fill:#0072b2}.serving{fill:#e69f00}.kv{fill:#cc79a7}.image{fill:#009e73}.other{fill:#8c959f}.unattributed{fill:#d55e00}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.paper{fill:#0d1117}.dim{fill:#9198a1}.grid{stroke:#3d444d}.axis{stroke:#9198a1}.line{stroke:#e6edf3}.before{stroke:#9198a1}
}
</style>`

// drawing is an SVG as it grows.
type drawing struct {
	strings.Builder

	long  float64   // seconds
	y     float64   // top of the next panel
	edges []float64 // of the intervals, seconds
}

// SVG draws the course of a record as Text does, as a file of its own: title,
// units, legend, for light and dark. An error says that there is nothing to draw.
func SVG(r *scaleout.Record) ([]byte, error) {
	long := seconds(r)
	if long <= 0 {
		return nil, fmt.Errorf("draw scale-out %s: it has no course", r.ID)
	}
	data := sample(r, pointwise(r.Series))
	sent, served := bytesOf(data.transmitted) > 0, peakOf(data.p90) > 0
	height := svgTop + tallPanel + svgGap
	if sent {
		height += smallPanel + svgGap
	}
	if served {
		height += smallPanel + svgGap
	}
	d := &drawing{long: long, y: svgTop, edges: data.edges}
	fmt.Fprintf(d, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" role="img">`+"\n", svgWidth, height, svgWidth, height)
	fmt.Fprintf(d, "<title>%s</title>\n%s\n", clean(headline(r)), svgStyle)
	fmt.Fprintf(d, `<rect class="paper" width="100%%" height="100%%"/>`+"\n")
	d.text(12, 24, "title", headline(r))
	d.text(12, 43, "dim", subline(r))
	d.legend(data.received, data.transmitted)
	d.stack("received, by class", data.received, tallPanel)
	if sent {
		d.stack("transmitted, by class", data.transmitted, smallPanel)
	}
	if served {
		d.latency(data)
	}
	d.text(svgWidth-svgRight, height-6, "dim end", "time since the start")
	d.WriteString("</svg>\n")
	return []byte(d.String()), nil
}

// headline says what was pulled where.
func headline(r *scaleout.Record) string {
	return fmt.Sprintf("Scale-out %s on %s: %s", r.ID, r.Node, r.Ref)
}

// subline says how it went.
func subline(r *scaleout.Record) string {
	took := r.Duration(r.Start.Add(time.Duration(seconds(r) * float64(time.Second))))
	var sources []string
	for _, s := range r.Sources {
		sources = append(sources, s.Kind+" "+s.Name)
	}
	text := fmt.Sprintf("%s in %s from %s", units.Bytes(r.Fetched()).Human(), took.Round(100*time.Millisecond), strings.Join(sources, ", "))
	if n := len(r.Overlap); n > 0 {
		text += fmt.Sprintf(", beside %d more", n)
	}
	if r.Visible != "full" {
		text += ", seen: " + r.Visible
	}
	return text + "; bytes of all localities"
}

// legend names each class that moved something, with what it moved.
func (d *drawing) legend(received, transmitted []band) {
	x, y := 12.0, 64.0
	for k, b := range received {
		var sent uint64
		if k < len(transmitted) {
			sent = transmitted[k].bytes
		}
		if b.bytes+sent == 0 {
			continue
		}
		text := fmt.Sprintf("%s, %s in", b.name, units.Bytes(b.bytes).Human())
		if sent > 0 {
			text += fmt.Sprintf(", %s out", units.Bytes(sent).Human())
		}
		wide := 24 + 6.4*float64(len(text))
		if x+wide > svgWidth-svgRight {
			x, y = 12, y+16
		}
		fmt.Fprintf(d, `<rect x="%.1f" y="%.1f" width="11" height="11" class="%s"/>`, x, y-9, b.name)
		d.text(x+16, y+1, "", text)
		x += wide
	}
}

// frame begins a panel: title, scale, marks of time. It gives where values lie.
func (d *drawing) frame(title string, scale axis, high float64) (y func(float64) float64) {
	top := d.y
	bottom := top + high
	y = func(v float64) float64 { return bottom - v/scale.top*high }
	d.text(svgLeft, top-7, "dim", title)
	for _, v := range []float64{0, scale.top / 2, scale.top} {
		fmt.Fprintf(d, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`, svgLeft, svgWidth-svgRight, y(v), y(v))
		d.text(svgLeft-8, y(v)+4, "end", scale.label(v))
	}
	for _, at := range marks(d.long, 10) {
		fmt.Fprintf(d, `<line class="axis" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, d.x(at), d.x(at), bottom, bottom+4)
		d.text(d.x(at), bottom+17, "mid", moment(at))
	}
	d.y = bottom + svgGap
	return y
}

// x is where a moment lies.
func (d *drawing) x(at float64) float64 { return svgLeft + at/d.long*(svgWidth-svgLeft-svgRight) }

// stack draws bands on top of each other, in steps: a rate is that between two points.
func (d *drawing) stack(title string, bands []band, high float64) {
	most := peak(bands)
	y := d.frame(fmt.Sprintf("%s (at most %s/s)", title, units.Bytes(most).Human()), rateAxis(most), high)
	edges := d.edges
	floor := make([]float64, len(edges)-1)
	for _, b := range bands {
		if b.bytes == 0 {
			continue
		}
		var path strings.Builder
		for i, rate := range b.rates {
			fmt.Fprintf(&path, "%s%.1f %.1fH%.1f", lead(i), d.x(edges[i]), y(floor[i]+rate), d.x(edges[i+1]))
		}
		for i := len(b.rates) - 1; i >= 0; i-- {
			fmt.Fprintf(&path, "L%.1f %.1fH%.1f", d.x(edges[i+1]), y(floor[i]), d.x(edges[i]))
			floor[i] += b.rates[i]
		}
		fmt.Fprintf(d, `<path class="%s" d="%sZ"><title>%s</title></path>`+"\n", b.name, path.String(), b.name)
	}
}

func lead(i int) string {
	if i == 0 {
		return "M"
	}
	return "L"
}

// latency draws the live p90 as a line with gaps where nothing was served.
func (d *drawing) latency(data course) {
	scale := latencyAxis(max(peakOf(data.p90), data.before))
	title := "live p90, round trips of connections that serve"
	if data.before > 0 {
		title += fmt.Sprintf(" (dashed: before, %s)", scale.label(data.before))
	}
	y := d.frame(title, scale, smallPanel)
	if data.before > 0 {
		fmt.Fprintf(d, `<line class="before" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/>`, svgLeft, svgWidth-svgRight, y(data.before), y(data.before))
	}
	var path strings.Builder
	open := false
	for i, v := range data.p90 {
		if v <= 0 {
			open = false
			continue
		}
		start := "M"
		if open {
			start = "L"
		}
		fmt.Fprintf(&path, "%s%.1f %.1fH%.1f", start, d.x(data.edges[i]), y(v), d.x(data.edges[i+1]))
		open = true
	}
	fmt.Fprintf(d, `<path class="line" d="%s"/>`+"\n", path.String())
}

func (d *drawing) text(x, y float64, class, text string) {
	if class != "" {
		class = ` class="` + class + `"`
	}
	fmt.Fprintf(d, `<text x="%.1f" y="%.1f"%s>%s</text>`+"\n", math.Round(x*10)/10, y, class, clean(text))
}

// clean makes a text that others chose one of XML.
func clean(text string) string {
	return html.EscapeString(strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 || r == 0xfffe || r == 0xffff {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(text, "?")))
}
