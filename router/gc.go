package router

import (
	"os"
	"runtime"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
)

// The collector's pace follows the live heap, unless GOGC is set: a small heap
// collects rarely, since short requests make garbage and keep nothing, and a
// large one (thousands of open streams) collects at the usual pace, so that
// its memory is what the streams need and not twice that.
const (
	relaxedPercent = 400
	usualPercent   = 100
	smallHeapBytes = 24 << 20
)

func tuneGC() {
	if os.Getenv("GOGC") != "" {
		return
	}
	debug.SetGCPercent(relaxedPercent)
	rearm(relaxedPercent)
}

// rearm leaves an object to the next collection, whose end looks at the heap.
func rearm(current int) {
	sentinel := new([16]byte)
	runtime.AddCleanup(sentinel, func(current int) {
		sample := []runtimemetrics.Sample{{Name: "/gc/heap/live:bytes"}}
		runtimemetrics.Read(sample)
		want := relaxedPercent
		if sample[0].Value.Uint64() > smallHeapBytes {
			want = usualPercent
		}
		if want != current {
			debug.SetGCPercent(want)
		}
		rearm(want)
	}, current)
}
