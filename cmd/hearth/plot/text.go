package plot

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/hearth-dev/hearth/nodeagent/scaleout"
	"github.com/hearth-dev/hearth/units"
)

// TextOptions say what a terminal can show.
type TextOptions struct {
	Width  int  // columns; fewer than 40 are taken for 40
	ASCII  bool // nothing but ASCII
	Colour bool
}

// Heights of the panels in rows.
const (
	receivedRows    = 10
	transmittedRows = 5
	latencyRows     = 5
)

// labelWidth is how wide the labels left of an axis are.
const labelWidth = 11

// glyphs draw the bands, as bandNames, and what frames them.
type glyphs struct {
	bands               []string
	eighths             []string // of a row, from nothing on
	trace               string   // less than half a row
	side, mark, corner  string
	floor, tick, before string
}

var (
	blocks = glyphs{
		bands: []string{"█", "▓", "▒", "░", "▚", "?"}, eighths: []string{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"}, trace: "▁",
		side: "│", mark: "┤", corner: "└", floor: "─", tick: "┴", before: "╌",
	}
	ascii = glyphs{
		bands: []string{"#", "=", "+", "%", "o", "?"}, eighths: []string{" ", "_", "_", "_", "_", "#", "#", "#", "#"}, trace: "_",
		side: "|", mark: "+", corner: "+", floor: "-", tick: "+", before: "-",
	}
)

// colours are those of the bands on a terminal, as bandNames.
var colours = []string{"\x1b[34m", "\x1b[33m", "\x1b[35m", "\x1b[32m", "\x1b[37m", "\x1b[31m"}

// canvas writes panels of one width.
type canvas struct {
	strings.Builder
	glyphs

	colour bool
	width  int // of the panels, without labels
}

// Text draws what was received and transmitted by class, and the live p90, one
// below the other over the same time; empty where the record has no series.
func Text(r *scaleout.Record, o TextOptions) string {
	long := seconds(r)
	if long <= 0 {
		return ""
	}
	c := &canvas{glyphs: blocks, colour: o.Colour, width: max(o.Width, 40) - labelWidth - 2}
	if o.ASCII {
		c.glyphs = ascii
	}
	data := sample(r, evenly(long, c.width))
	c.stack("received, by class", data.received, receivedRows)
	c.times(long)
	c.legend(data.received)
	if bytesOf(data.transmitted) > 0 {
		c.WriteByte('\n')
		c.stack("transmitted, by class", data.transmitted, transmittedRows)
		c.times(long)
		c.legend(data.transmitted)
	}
	c.WriteByte('\n')
	c.latency(data)
	if peakOf(data.p90) > 0 {
		c.times(long)
	}
	return c.String()
}

// stack draws bands on top of each other.
func (c *canvas) stack(title string, bands []band, rows int) {
	most := peak(bands)
	scale := rateAxis(most)
	c.title(fmt.Sprintf("%s: at most %s/s", title, units.Bytes(most).Human()))
	cells := make([][]int, c.width) // of each column: the band of each row
	for x := range cells {
		cells[x] = column(bands, x, scale.top, rows)
	}
	for row := rows; row > 0; row-- {
		c.edge(scale, row, rows)
		for x := range cells {
			switch k := cells[x][row-1]; {
			case k == none:
				c.WriteByte(' ')
			case k >= len(c.bands):
				c.paint(k-len(c.bands), c.trace)
			default:
				c.paint(k, c.bands[k])
			}
		}
		c.end()
	}
}

// none is a cell without a band.
const none = -1

// column gives the band of each row from the floor up. A column with so little
// that it fills no half row has a trace of its largest band: past the bands.
func column(bands []band, x int, top float64, rows int) []int {
	cells := make([]int, rows)
	filled, largest := 0, 0
	var sum float64
	for k, b := range bands {
		sum += b.rates[x]
		if b.rates[x] > bands[largest].rates[x] {
			largest = k
		}
		for to := int(math.Round(sum / top * float64(rows))); filled < min(to, rows); filled++ {
			cells[filled] = k
		}
	}
	for i := filled; i < rows; i++ {
		cells[i] = none
	}
	if filled == 0 && sum > 0 {
		cells[0] = largest + len(bandNames)
	}
	return cells
}

// latency draws the live p90, and how it was before.
func (c *canvas) latency(data course) {
	most := peakOf(data.p90)
	if most <= 0 {
		c.WriteString("live p90: nothing was served\n")
		return
	}
	scale := latencyAxis(max(most, data.before))
	title := "live p90, round trips of serving"
	before := none
	if data.before > 0 {
		title += fmt.Sprintf(" (%s: before, %s)", strings.Repeat(c.before, 2), scale.label(data.before))
		before = max(int(math.Ceil(data.before/scale.top*latencyRows)), 1)
	}
	c.title(title)
	full := len(c.eighths) - 1
	for row := latencyRows; row > 0; row-- {
		c.edge(scale, row, latencyRows)
		for _, v := range data.p90 {
			level := int(math.Round(v/scale.top*latencyRows*float64(full))) - (row-1)*full
			if row == 1 && v > 0 {
				level = max(level, 1)
			}
			switch {
			case level > 0:
				c.WriteString(c.eighths[min(level, full)])
			case row == before:
				c.WriteString(c.before)
			default:
				c.WriteByte(' ')
			}
		}
		c.end()
	}
}

// title begins a panel, in as many lines as it takes.
func (c *canvas) title(text string) {
	line := 0
	for i, word := range strings.Fields(text) {
		wide := utf8.RuneCountInString(word)
		switch {
		case i == 0:
		case line+1+wide > labelWidth+2+c.width:
			c.WriteByte('\n')
			line = 0
		default:
			c.WriteByte(' ')
			line++
		}
		c.WriteString(word)
		line += wide
	}
	c.WriteByte('\n')
}

// edge begins a row with its label, where it has one.
func (c *canvas) edge(scale axis, row, rows int) {
	label, side := "", c.side
	switch row {
	case rows:
		label, side = scale.label(scale.top), c.mark
	case (rows + 1) / 2:
		if rows%2 == 0 {
			label, side = scale.label(scale.top/2), c.mark
		}
	}
	fmt.Fprintf(c, "%*s %s", labelWidth, label, side)
}

// times ends a panel with the axis of time.
func (c *canvas) times(long float64) {
	floor := make([]string, c.width)
	for i := range floor {
		floor[i] = c.floor
	}
	labels := []rune(strings.Repeat(" ", labelWidth+2+c.width))
	for _, at := range marks(long, c.width/12) {
		x := min(int(at/long*float64(c.width)), c.width-1)
		floor[x] = c.tick
		text := []rune(moment(at))
		if from := labelWidth + 2 + x; from+len(text) <= len(labels) {
			copy(labels[from:], text)
		}
	}
	fmt.Fprintf(c, "%*s %s%s\n%s\n", labelWidth, "0", c.corner, strings.Join(floor, ""), strings.TrimRight(string(labels), " "))
}

// legend names the bands with what they moved; those that moved nothing are left out.
func (c *canvas) legend(bands []band) {
	line := ""
	for k, b := range bands {
		if b.bytes == 0 {
			continue
		}
		text := fmt.Sprintf("%s %s %s", c.bands[k], b.name, units.Bytes(b.bytes).Human())
		if line != "" && utf8.RuneCountInString(line)+3+utf8.RuneCountInString(text) > labelWidth+2+c.width {
			fmt.Fprintln(c, line)
			line = ""
		}
		if line != "" {
			line += "   "
		}
		line += text
	}
	if line != "" {
		fmt.Fprintln(c, line)
	}
}

func (c *canvas) paint(band int, glyph string) {
	if c.colour {
		glyph = colours[band] + glyph + "\x1b[0m"
	}
	c.WriteString(glyph)
}

// end ends a row without blanks behind it.
func (c *canvas) end() {
	text := strings.TrimRight(c.String(), " ")
	c.Reset()
	c.WriteString(text + "\n")
}

func peakOf(values []float64) float64 {
	var most float64
	for _, v := range values {
		most = max(most, v)
	}
	return most
}
