package terminal

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/hearth-dev/hearth/units"
)

// Progress shows how far several transfers are: bars on a terminal, plain lines
// otherwise (one when a transfer starts or ends, and one per ten percent but at
// most one a second). Its methods may be called from any goroutine.
type Progress struct {
	w    io.Writer
	bars *mpb.Progress
	now  func() time.Time

	mu    sync.Mutex
	tasks map[string]*task
}

type task struct {
	bar     *mpb.Bar
	shown   int64
	last    time.Time
	started bool
	done    bool
}

// NewProgress shows progress on w, which should be a command's Err.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w, tasks: map[string]*task{}, now: time.Now}
	if Interactive(w) {
		p.bars = mpb.New(mpb.WithOutput(w), mpb.WithWidth(40), mpb.WithRefreshRate(200*time.Millisecond))
	}
	return p
}

// Set says that the transfer called name has present of total bytes; total 0
// means not known yet. state is one word that stands beside it, such as
// "filling".
func (p *Progress) Set(name, state string, present, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tasks[name]
	if t == nil {
		t = &task{}
		p.tasks[name] = t
	}
	if t.done {
		return
	}
	if p.bars != nil {
		p.setBar(t, name, present, total)
		return
	}
	now := p.now()
	if t.started && (total <= 0 || (present-t.shown)*10 < total || now.Sub(t.last) < time.Second) {
		return
	}
	t.started, t.shown, t.last = true, present, now
	if total > 0 {
		fmt.Fprintf(p.w, "%s: %s %d%% (%s of %s)\n", name, state, present*100/total, units.Bytes(present).Human(), units.Bytes(total).Human())
		return
	}
	fmt.Fprintf(p.w, "%s: %s\n", name, state)
}

func (p *Progress) setBar(t *task, name string, present, total int64) {
	if t.bar == nil {
		t.bar = p.bars.AddBar(total,
			mpb.PrependDecorators(decor.Name(Plain(name), decor.WCSyncSpaceR)),
			mpb.AppendDecorators(
				decor.CountersKibiByte("% .1f / % .1f", decor.WCSyncSpace),
				decor.Percentage(decor.WCSyncSpace),
				decor.AverageSpeed(decor.SizeB1024(0), "% .0f", decor.WCSyncSpace),
			))
	}
	if total > 0 {
		t.bar.SetTotal(total, false)
	}
	t.bar.SetCurrent(present)
}

// Done says that the transfer called name has ended; word tells how, such as
// "ready".
func (p *Progress) Done(name, word string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.tasks[name]
	if t == nil {
		t = &task{}
		p.tasks[name] = t
	}
	if t.done {
		return
	}
	t.done = true
	if t.bar != nil {
		t.bar.Abort(false)
	}
	if p.bars == nil {
		fmt.Fprintf(p.w, "%s: %s\n", name, word)
	}
}

// Close ends every bar and waits until the terminal shows the last state.
func (p *Progress) Close() {
	if p.bars == nil {
		return
	}
	p.mu.Lock()
	for _, t := range p.tasks {
		if t.bar != nil {
			t.bar.Abort(false)
		}
	}
	p.mu.Unlock()
	p.bars.Wait()
}
