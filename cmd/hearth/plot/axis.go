package plot

import (
	"math"
	"strconv"
)

// axis is a scale from 0 to a round number, and how its values read.
type axis struct {
	top    float64
	unit   float64 // in which values are told
	suffix string
}

// label is a value of the axis with its unit.
func (a axis) label(value float64) string {
	if value == 0 {
		return "0"
	}
	return strconv.FormatFloat(value/a.unit, 'g', 4, 64) + " " + a.suffix
}

// binaryTops are the round numbers of units that are powers of 1024: half of each
// reads well, too.
var binaryTops = []float64{1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 200, 256, 320, 400, 512, 640, 800, 1024}

var decimalTops = []float64{1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 40, 50, 60, 80, 100, 120, 150, 200, 300, 400, 500, 600, 800, 1000}

// rateAxis is the scale of rates up to a peak in bytes a second.
func rateAxis(peak float64) axis {
	a := axis{unit: 1, suffix: "B/s"}
	for _, suffix := range []string{"KiB/s", "MiB/s", "GiB/s", "TiB/s"} {
		if roundUp(binaryTops, peak/a.unit) < 1024 {
			break
		}
		a.unit, a.suffix = a.unit*1024, suffix
	}
	a.top = a.unit * roundUp(binaryTops, peak/a.unit)
	return a
}

// latencyAxis is the scale of round trips up to a peak in seconds.
func latencyAxis(peak float64) axis {
	a := axis{unit: 1e-6, suffix: "us"}
	if peak > 800e-6 {
		a.unit, a.suffix = 1e-3, "ms"
	}
	if peak > 800e-3 {
		a.unit, a.suffix = 1, "s"
	}
	a.top = a.unit * roundUp(decimalTops, peak/a.unit)
	return a
}

func roundUp(tops []float64, value float64) float64 {
	for _, top := range tops {
		if value <= top {
			return top
		}
	}
	return math.Ceil(value)
}

// timeSteps are the distances of marks on the axis of time, in seconds.
var timeSteps = []float64{0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400}

// marks are the moments to name on an axis of time, at most about most.
func marks(seconds float64, most int) []float64 {
	step := timeSteps[len(timeSteps)-1]
	for _, s := range timeSteps {
		if seconds/s <= float64(most) {
			step = s
			break
		}
	}
	var list []float64
	for i := range most + 1 {
		if at := float64(i) * step; at <= seconds {
			list = append(list, at)
		}
	}
	return list
}

// moment is a time as a mark has it: "0", "2.5 s", "3 min", "1 h".
func moment(seconds float64) string {
	whole := func(unit float64) bool { return seconds >= unit && math.Mod(seconds, unit) == 0 }
	number := func(unit float64) string { return strconv.FormatFloat(math.Round(seconds/unit*10)/10, 'g', -1, 64) }
	switch {
	case seconds == 0:
		return "0"
	case whole(3600):
		return number(3600) + " h"
	case whole(60):
		return number(60) + " min"
	}
	return number(1) + " s"
}
