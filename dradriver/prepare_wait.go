package dradriver

import (
	"context"
	"slices"
	"time"
)

const (
	// defaultPullWait is how long a call waits at most for pulls, from its
	// arrival on: the kubelet gives it 45 s, and comes again only after a minute
	// and more.
	defaultPullWait = 20 * time.Second
	// learnWithin is how long a pull is given to show how fast it is.
	learnWithin = 3 * time.Second
	// answerWithin is what remains of a call's own deadline when it waits no more.
	answerWithin = 5 * time.Second
	// askEvery is how often a pull is asked for that tells no news.
	askEvery = time.Second
)

// await waits for the pulls of claims that lack nothing else and whose weights
// are likely to be there soon, and then goes on with those claims. It ends with
// the call's bound, or as soon as an Unprepare wants one of the call's claims;
// what is not there then keeps the error that says how far it is.
func (d *Driver) await(ctx context.Context, arrived arrival, all []*preparing) {
	waiting := slices.DeleteFunc(slices.Clone(all), func(p *preparing) bool { return !p.waits })
	if len(waiting) == 0 || d.o.PullWait < 0 {
		return
	}
	changed, end := d.o.Cache.Subscribe()
	defer end()
	defer d.pulls.await(slices.Clone(waiting))()
	patient, impatient := arrived.visit.within(ctx)
	defer impatient()
	until := arrived.at.Add(d.o.PullWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Add(-answerWithin).Before(until) {
		until = deadline.Add(-answerWithin)
	}
	patient, cancel := context.WithDeadline(patient, until)
	defer cancel()
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for begun := time.Now(); ; {
		d.goOn(ctx, patient, waiting)
		waiting = slices.DeleteFunc(waiting, func(p *preparing) bool {
			if !p.waits {
				return true
			}
			outlook := d.pulls.outlook(p.entry.UID, time.Until(until))
			// Rates vary: what was likely once is waited for to the end.
			p.likely = p.likely || outlook == soon
			return !p.likely && (outlook == late || time.Since(begun) >= learnWithin)
		})
		if len(waiting) == 0 {
			return
		}
		select {
		case <-patient.Done():
			return
		case <-changed:
		case <-tick.C:
		}
	}
}

// goOn asks for the pulls of claims, and goes on with those whose pulls ended,
// one way or the other.
func (d *Driver) goOn(ctx, patient context.Context, waiting []*preparing) {
	d.each(waiting, func(p *preparing) {
		lacks := d.pulls.ask(patient, p.entry.UID)
		switch {
		case patient.Err() != nil: // what was answered, if anything, came too late
		case onlyWaiting(lacks):
			p.err = joined(lacks)
		default:
			p.err, p.waits = nil, false
		}
	})
	ended := slices.DeleteFunc(slices.Clone(waiting), func(p *preparing) bool { return p.waits })
	if len(ended) == 0 {
		return
	}
	asking := newAsking(ctx)
	defer asking.end()
	d.holdAll(ctx, asking, ended)
	d.commitAll(ctx, ended)
}

// await notes that a call asks for the pulls of claims, so that nobody else does
// until the func is called.
func (o *openings) await(all []*preparing) (over func()) {
	set := func(awaited bool) {
		o.mu.Lock()
		defer o.mu.Unlock()
		for _, p := range all {
			if c := o.claims[p.entry.UID]; c != nil {
				c.awaited = awaited
			}
		}
	}
	set(true)
	return func() { set(false) }
}

// outlook is how likely all weights that a claim waits for are there in time.
// Greater is better.
type outlook uint8

const (
	late    outlook = iota
	unknown         // no rate yet, or that of a pull which has just begun
	soon            // by their rate, or since they are being checked
)

// outlook judges the pulls of a claim by the time that there is.
func (o *openings) outlook(uid string, within time.Duration) outlook {
	now := o.d.o.Now()
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.claims[uid]
	if c == nil {
		return late
	}
	least := soon
	for _, pull := range c.pulls {
		p := pull.progress
		switch {
		case pull.verdict.ready, p.Size > 0 && p.Present >= p.Size, p.Left > 0 && p.Left <= within:
		case pull.verdict.failed:
			return late
		case p.Left == 0, now.Sub(c.waits) < learnWithin:
			least = unknown
		default:
			return late
		}
	}
	return least
}
