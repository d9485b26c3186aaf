package plot

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

var update = flag.Bool("update", false, "write the golden files")

// fixed is a pull of 12 s that climbs, holds and ends while another pod serves.
func fixed() *scaleout.Record {
	start := time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	r := &scaleout.Record{
		ID: "1z141z4", Node: "node-1", State: scaleout.StateReady, Ref: "hub://org/name@main", Start: start, End: start.Add(12 * time.Second),
		Sources: []scaleout.Source{{Name: "hub", Kind: scaleout.KindOrigin, Bytes: 9 << 30}}, Overlap: []string{"1z141z3"}, Visible: "partial",
		Before: scaleout.Latency{Samples: 100, P90: 0.0004},
	}
	var weights, serving, out, unattributed uint64
	for i := 1; i <= 48; i++ {
		at := float64(i) / 4
		if at > 1 && at <= 11 {
			weights += uint64(min(at-1, 3) / 3 * (256 << 20))
		}
		serving, out, unattributed = serving+20<<10, out+24<<20, unattributed+2<<20
		p := scaleout.Point{
			Seconds: at, Received: map[string]uint64{"weights": weights, "serving": serving}, Transmitted: map[string]uint64{"weights": weights / 200, "serving": out},
			UnattributedReceived: unattributed, P90: 0.0004 + 0.0001*min(at, 8),
		}
		if at > 5 {
			p.Received["image"] = uint64((at - 5) * (150 << 20))
		}
		if at > 9 && at < 10 {
			p.P90 = 0
		}
		r.Series = append(r.Series, p)
	}
	return r
}

func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-want +got):\n%s", file, diff)
	}
}

func TestACourseIsDrawnAsStored(t *testing.T) {
	t.Parallel()
	golden(t, "testdata/course.txt", []byte(Text(fixed(), TextOptions{Width: 100})))
	golden(t, "testdata/course_ascii.txt", []byte(Text(fixed(), TextOptions{Width: 60, ASCII: true})))
	drawn, err := SVG(fixed())
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "testdata/course.svg", drawn)
}

func TestADrawingIsXMLWhateverNamesItHas(t *testing.T) {
	t.Parallel()
	r := fixed()
	r.Ref, r.Node, r.Sources[0].Name = "hub://<script>&\"", "n\x1b[2J\xff", "\ufffe"
	drawn, err := SVG(r)
	if err != nil {
		t.Fatal(err)
	}
	for decoder := xml.NewDecoder(bytes.NewReader(drawn)); ; {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if element, ok := token.(xml.StartElement); ok && element.Name.Local == "script" {
			t.Error("a name became an element")
		}
	}
}

func TestNoLineIsWiderThanTheTerminalAndASCIIIsASCII(t *testing.T) {
	t.Parallel()
	for _, width := range []int{0, 40, 41, 80, 200} {
		text := Text(fixed(), TextOptions{Width: width, ASCII: true})
		for line := range strings.Lines(text) {
			if len(strings.TrimRight(line, "\n")) > max(width, 40) {
				t.Errorf("width %d: %d columns: %s", width, len(line), line)
			}
		}
		if strings.ContainsFunc(text, func(r rune) bool { return r > '~' }) {
			t.Errorf("width %d is not ASCII:\n%s", width, text)
		}
	}
	plain, coloured := Text(fixed(), TextOptions{Width: 80}), Text(fixed(), TextOptions{Width: 80, Colour: true})
	for _, code := range append([]string{"\x1b[0m"}, colours...) {
		coloured = strings.ReplaceAll(coloured, code, "")
	}
	if plain != coloured {
		t.Error("colour changes more than colour")
	}
}

func TestRatesAreDifferencesBetweenPointsAndKeepEveryByte(t *testing.T) {
	t.Parallel()
	r := &scaleout.Record{Series: []scaleout.Point{
		{Seconds: 1, Received: map[string]uint64{"weights": 100}, P90: 0.001},
		{Seconds: 3, Received: map[string]uint64{"weights": 500}, P90: 0.005},
		{Seconds: 4, Received: map[string]uint64{"weights": 500, "kv": 8}},
		{Seconds: 4, Received: map[string]uint64{"weights": 600, "kv": 8}, UnattributedReceived: 4},
	}}
	c := sample(r, []float64{0, 1, 2, 3, 4})
	if diff := cmp.Diff([]float64{100, 200, 200, 0}, c.received[0].rates); diff != "" {
		t.Errorf("rates differ (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]float64{0.001, 0.005, 0.005, 0}, c.p90); diff != "" {
		t.Errorf("p90 differs (-want +got):\n%s", diff)
	}
	for _, edges := range [][]float64{evenly(12, 7), evenly(12, 300), pointwise(fixed().Series)} {
		c := sample(fixed(), edges)
		for _, b := range c.received {
			var sum float64
			for i, rate := range b.rates {
				sum += rate * (edges[i+1] - edges[i])
			}
			if math.Abs(sum-float64(b.bytes)) > 1 {
				t.Errorf("%s: rates over %d intervals are %.0f bytes of %d", b.name, len(edges)-1, sum, b.bytes)
			}
		}
	}
}

func TestPointsThatAlmostMeetMakeOneInterval(t *testing.T) {
	t.Parallel()
	at := func(seconds ...float64) (list []scaleout.Point) {
		for _, s := range seconds {
			list = append(list, scaleout.Point{Seconds: s})
		}
		return list
	}
	for name, c := range map[string]struct {
		series []scaleout.Point
		want   []float64
	}{
		"the last two":  {at(1, 2, 2.001), []float64{0, 1, 2.001}},
		"one":           {at(3), []float64{0, 3}},
		"a short one":   {at(0.01, 0.02), []float64{0, 0.01, 0.02}},
		"the first two": {at(0.001, 1, 2), []float64{0, 1, 2}},
	} {
		if diff := cmp.Diff(c.want, pointwise(c.series)); diff != "" {
			t.Errorf("%s: edges differ (-want +got):\n%s", name, diff)
		}
	}
}

func TestALittleLeavesATraceAndNothingLeavesNone(t *testing.T) {
	t.Parallel()
	bands := []band{{rates: []float64{1000, 1, 0}}, {rates: []float64{0, 2, 0}}}
	for x, want := range [][]int{{0, 0}, {len(bandNames) + 1, none}, {none, none}} {
		if diff := cmp.Diff(want, column(bands, x, 1000, 2)); diff != "" {
			t.Errorf("column %d differs (-want +got):\n%s", x, diff)
		}
	}
}

func TestAxesAreRoundAndHaveUnits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a    axis
		want string
	}{
		{rateAxis(0), "1 B/s"},
		{rateAxis(1023), "1 KiB/s"},
		{rateAxis(1.4 * 1024), "1.5 KiB/s"},
		{rateAxis(1.9 * (1 << 30)), "2 GiB/s"},
		{latencyAxis(0.00035), "400 us"},
		{latencyAxis(0.0009), "1 ms"},
		{latencyAxis(0.0012), "1.5 ms"},
		{latencyAxis(7), "8 s"},
	} {
		if got := c.a.label(c.a.top); got != c.want {
			t.Errorf("top is %s, want %s", got, c.want)
		}
	}
	for long, want := range map[float64]string{1: "0 0.2 s 0.4 s 0.6 s 0.8 s 1 s", 12: "0 5 s 10 s", 300: "0 1 min 2 min 3 min 4 min 5 min", 20000: "0 2 h 4 h"} {
		var got []string
		for _, at := range marks(long, 5) {
			got = append(got, moment(at))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("marks of %v s are %v, want %s", long, got, want)
		}
	}
}

func TestARecordWithoutACourseHasNoDrawing(t *testing.T) {
	t.Parallel()
	r := fixed()
	for _, series := range [][]scaleout.Point{nil, {{}}} {
		r.Series = series
		if text := Text(r, TextOptions{Width: 80}); text != "" {
			t.Errorf("drew %q", text)
		}
		if _, err := SVG(r); err == nil || !strings.Contains(err.Error(), "1z141z4") {
			t.Errorf("the error is %v", err)
		}
	}
	r.Series = []scaleout.Point{{Seconds: 1}}
	if text := Text(r, TextOptions{Width: 80}); !strings.Contains(text, "nothing was served") {
		t.Errorf("drew %q", text)
	}
	if _, err := SVG(r); err != nil {
		t.Error(err)
	}
}
