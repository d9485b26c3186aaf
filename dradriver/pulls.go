package dradriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/dradriver/ledger"
	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/units"
)

const (
	// pollEvery is how often a pull that a claim waits for is looked at between
	// the kubelet's own calls.
	pollEvery = 2 * time.Second
	// coldFailureFor is how long a failed pull counts for the cold device.
	coldFailureFor = 10 * time.Minute
	// turnTimeout bounds the wait for the turn of a claim in the background.
	turnTimeout = time.Second
)

// ColdFailure is the last pull for a claim that could not succeed, while it
// counts: until a later pull succeeds, or for 10 minutes.
type ColdFailure struct {
	Reason string // CamelCase token
	Text   string // for people
	Since  time.Time
}

// pulling is one artifact that a claim waits for.
type pulling struct {
	request  string
	weight   ledger.Weight
	progress stock.Progress
	verdict  verdict
	told     map[string]bool // reasons that the cluster was told of it
}

// opening is a claim between Begin and Commit, as far as only this process
// needs to know it.
type opening struct {
	claim     Object
	pods      []Object
	results   []ledger.Result
	gpus      int // GPUs that wait with it, whoever's they are
	deletePod map[string]bool
	deadline  map[string]time.Duration    // of pulls, by request; 0 is the agent's
	wasFalse  bool                        // its status says Prepared=False already
	waits     time.Time                   // since when weights are waited for; zero: they are not
	pulls     map[string]*pulling         // by request
	awaited   bool                        // a call asks for them
	had       bool                        // it was prepared before: other artifacts will not do
	said      map[string]metav1.Condition // by request
}

// openings follows the claims that are being prepared: how far their pulls are,
// what was told of failures, and how long GPUs waited.
type openings struct {
	d *Driver

	mu       sync.Mutex
	claims   map[string]*opening
	waited   float64 // GPU seconds of claims that wait no more
	failures uint64  // pulls that could not succeed
	cold     ColdFailure
	sum      units.Bytes // of the cold device, as last signalled
	changed  chan struct{}
}

func newOpenings(d *Driver) *openings {
	o := &openings{d: d, claims: map[string]*opening{}, changed: make(chan struct{}, 1)}
	o.sum = d.ColdTaken()
	return o
}

// ColdFailure gives the failed pull that counts now, if one does.
func (d *Driver) ColdFailure() (ColdFailure, bool) {
	d.pulls.mu.Lock()
	defer d.pulls.mu.Unlock()
	return d.pulls.coldLocked()
}

func (o *openings) coldLocked() (ColdFailure, bool) {
	counts := o.cold.Reason != "" && o.d.o.Now().Sub(o.cold.Since) < coldFailureFor
	return o.cold, counts
}

// ColdFailureChanged holds a signal after ColdFailure or ColdTaken changed.
func (d *Driver) ColdFailureChanged() <-chan struct{} { return d.pulls.changed }

// ColdTaken is what the claims that the ledger knows have of the cold device's
// size, in bytes.
func (d *Driver) ColdTaken() units.Bytes {
	var sum units.Bytes
	for _, entry := range d.o.Ledger.Entries() {
		for _, r := range entry.Results {
			if r.Kind == ledger.KindCold {
				sum += units.Bytes(r.Consumed[string(CapacitySize)])
			}
		}
	}
	return sum
}

func (o *openings) signal() {
	select {
	case o.changed <- struct{}{}:
	default:
	}
}

// taken signals where what claims have of the cold device changed.
func (o *openings) taken() {
	sum := o.d.ColdTaken()
	o.mu.Lock()
	defer o.mu.Unlock()
	if sum != o.sum {
		o.sum = sum
		o.signal()
	}
}

// open notes a claim whose plan was begun.
func (o *openings) open(p *preparing) {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.claims[p.entry.UID]
	if c == nil {
		c = &opening{pulls: map[string]*pulling{}, said: map[string]metav1.Condition{}}
		o.claims[p.entry.UID] = c
	}
	c.claim = Object{Kind: "ResourceClaim", Namespace: p.entry.Namespace, Name: p.entry.Name, UID: p.entry.UID}
	c.results, c.gpus, c.pods, c.had = p.entry.Results, waitingGPUs(p), nil, p.again
	for _, pod := range PodsOf(p.claim) {
		c.pods = append(c.pods, Object{Kind: "Pod", Namespace: p.entry.Namespace, Name: pod.Name, UID: pod.UID})
	}
	c.deletePod, c.deadline = map[string]bool{}, map[string]time.Duration{}
	for i, r := range p.entry.Results {
		c.deletePod[r.Request], c.deadline[r.Request] = p.words[i].deletePod, p.words[i].deadline
	}
	c.wasFalse = c.wasFalse || saysUnprepared(p)
}

// saysUnprepared reports whether the claim's status has a condition of ours
// that is to be taken back once it is prepared.
func saysUnprepared(p *preparing) bool {
	for _, status := range p.claim.Status.Devices {
		if status.Driver != Name {
			continue
		}
		if slices.ContainsFunc(status.Conditions, func(c metav1.Condition) bool {
			return c.Type == ConditionPrepared && c.Status == metav1.ConditionFalse
		}) {
			return true
		}
	}
	return false
}

// waitingGPUs counts the GPUs of a claim: ours, and those of drivers that are
// named for them (gpu.nvidia.com, gpu.amd.com, gpu.intel.com).
func waitingGPUs(p *preparing) int {
	count := 0
	for _, r := range p.entry.Results {
		if r.Kind == ledger.KindGPU && !r.AdminAccess {
			count++
		}
	}
	for _, r := range p.claim.Status.Allocation.Devices.Results {
		if strings.HasPrefix(r.Driver, "gpu.") && (r.AdminAccess == nil || !*r.AdminAccess) {
			count++
		}
	}
	return count
}

// progress notes how far a pull is and gives the error that says so, nil where
// it is ready.
func (o *openings) progress(uid, request string, w *ledger.Weight, p stock.Progress) error {
	now := o.d.o.Now()
	v := judge(w.Ref, p, w.Deadline, now)
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.claims[uid]
	if c == nil {
		return nil
	}
	pull := c.pulls[request]
	if pull == nil {
		pull = &pulling{request: request, told: map[string]bool{}}
		c.pulls[request] = pull
	}
	pull.weight, pull.progress, pull.verdict = *w, p, v
	switch {
	case v.ready:
		if o.cold.Reason != "" {
			o.cold = ColdFailure{}
			o.signal()
		}
		return nil
	case c.waits.IsZero():
		c.waits = now
	}
	if !v.failed {
		return fmt.Errorf("%w: %s", errWaiting, v.text)
	}
	o.failLocked(c, pull, now)
	return errors.New(v.text + " (" + v.reason + ")")
}

// failLocked tells of a pull that cannot succeed, once for each reason.
func (o *openings) failLocked(c *opening, pull *pulling, now time.Time) {
	v := pull.verdict
	if pull.told[v.reason] {
		return
	}
	pull.told[v.reason] = true
	o.failures++
	o.cold = ColdFailure{Reason: v.reason, Text: v.text, Since: now}
	o.signal()
	for _, object := range append([]Object{c.claim}, c.pods...) {
		o.d.o.Cluster.Event(object, true, "WeightsPullFailed", v.text)
	}
	o.conditionsLocked(c, metav1.ConditionFalse, pull.request, v.reason, v.text)
	c.wasFalse = true
	o.d.o.Log.Warn("a pull for a claim cannot succeed", slog.String("claim", c.claim.UID), slog.String("ref", pull.weight.Ref.String()), slog.String("reason", v.reason), slog.String("text", v.text))
	if c.deletePod[pull.request] {
		for _, pod := range c.pods {
			o.d.o.Log.Warn("a pod is deleted since its weights cannot come", slog.String("claim", c.claim.UID), slog.String("pod", pod.Name))
			o.d.o.Cluster.DeletePod(pod)
		}
	}
}

// conditionsLocked sets the condition Prepared of the devices of a request, or
// of all of the claim's where it names none. What was said of other requests is
// said again, since only the latest of a claim stand.
func (o *openings) conditionsLocked(c *opening, status metav1.ConditionStatus, request, reason, text string) {
	var conditions []DeviceCondition
	for _, r := range c.results {
		if request == "" || r.Request == request {
			c.said[r.Request] = metav1.Condition{Type: ConditionPrepared, Status: status, Reason: reason, Message: text}
		}
		if said, ok := c.said[r.Request]; ok {
			conditions = append(conditions, DeviceCondition{Pool: r.Pool, Device: r.Device, ShareID: r.ShareID, Condition: said})
		}
	}
	o.d.o.Cluster.SetConditions(c.claim, conditions)
}

// done ends the opening of a claim that is prepared.
func (o *openings) done(p *preparing) {
	o.mu.Lock()
	defer o.mu.Unlock()
	c := o.claims[p.entry.UID]
	if c == nil {
		return
	}
	if c.wasFalse {
		o.conditionsLocked(c, metav1.ConditionTrue, "", "Prepared", "")
	}
	o.closeLocked(p.entry.UID)
}

// close ends the opening of a claim that is gone.
func (o *openings) close(uid string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closeLocked(uid)
}

func (o *openings) closeLocked(uid string) {
	if c := o.claims[uid]; c != nil {
		o.waited += c.gpuSeconds(o.d.o.Now())
		delete(o.claims, uid)
	}
}

func (c *opening) gpuSeconds(now time.Time) float64 {
	if c.waits.IsZero() {
		return 0
	}
	return float64(c.gpus) * now.Sub(c.waits).Seconds()
}

// deadline is that of a pull which goes on; zero: there is none. What the ledger
// does not keep of it, since the claim was prepared before, is to last until the
// next call.
func (o *openings) deadline(uid, request string) time.Time {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c := o.claims[uid]; c != nil && c.pulls[request] != nil && !c.pulls[request].verdict.ready {
		return c.pulls[request].weight.Deadline
	}
	return time.Time{}
}

// deadlineOf is how long a pull of a request may take.
func (d *Driver) deadlineOf(p *preparing, r *ledger.Result) time.Duration {
	for i := range p.entry.Results {
		if p.entry.Results[i].Request == r.Request && p.words[i].deadline > 0 {
			return p.words[i].deadline
		}
	}
	return d.o.PullDeadline
}

// run looks at the pulls that claims wait for until ctx ends. The kubelet asks
// ever more seldom; a failure is to be told when it happens.
func (o *openings) run(ctx context.Context) {
	var weights <-chan struct{}
	if o.d.o.Cache != nil {
		changed, end := o.d.o.Cache.Subscribe()
		defer end()
		weights = changed
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	counted := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-weights:
		case <-tick.C:
		}
		o.poll(ctx)
		o.mu.Lock()
		_, counts := o.coldLocked()
		if counted != counts {
			o.signal()
		}
		counted = counts
		o.mu.Unlock()
	}
}

// poll asks how far each pull is that is not ready.
func (o *openings) poll(ctx context.Context) {
	o.mu.Lock()
	var uids []string
	for uid, c := range o.claims {
		for _, pull := range c.pulls {
			if !pull.verdict.ready && !c.awaited {
				uids = append(uids, uid)
				break
			}
		}
	}
	o.mu.Unlock()
	slices.Sort(uids)
	for _, uid := range uids {
		o.look(ctx, uid)
	}
}

// look asks for the pulls of one claim, in its turn: a claim that was
// unprepared meanwhile must not begin to pull again. It makes way for whoever
// wants the turn.
func (o *openings) look(ctx context.Context, uid string) {
	turn, cancel := context.WithTimeout(ctx, turnTimeout)
	defer cancel()
	visit, err := o.d.calls.enter(turn, []string{uid}, rankBackground)
	if err != nil {
		return
	}
	defer visit.leave()
	entry, known := o.d.o.Ledger.Get(uid)
	if !known || entry.State == ledger.Prepared && entry.Boot == o.d.o.Ledger.BootID() {
		o.close(uid)
		return
	}
	ctx, end := visit.within(ctx)
	defer end()
	ctx, cancel = context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	o.ask(ctx, uid)
}

// ask asks for the pulls of a claim that are not ready, in the claim's turn, and
// gives what it lacks yet.
func (o *openings) ask(ctx context.Context, uid string) (lacks []error) {
	type question struct {
		pulling
		result ledger.Result
		had    bool
	}
	var questions []question
	o.mu.Lock()
	if c := o.claims[uid]; c != nil {
		for _, r := range c.results {
			if pull := c.pulls[r.Request]; pull != nil && !pull.verdict.ready {
				questions = append(questions, question{*pull, r, c.had})
			}
		}
	}
	o.mu.Unlock()
	for i := range questions {
		q := &questions[i]
		progress := q.progress
		// What failed for good is asked for again by the kubelet only.
		if !progress.Final {
			var err error
			if progress, err = o.d.o.Cache.Pull(ctx, q.weight.Ref, uid); err != nil {
				lacks = append(lacks, within(q.request, err))
				continue
			}
			progress = meant(&q.result, &q.weight, q.had, progress)
		}
		if err := o.progress(uid, q.request, &q.weight, progress); err != nil {
			lacks = append(lacks, within(q.request, err))
		}
	}
	return lacks
}
