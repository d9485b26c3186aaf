package health

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/hearth-dev/hearth/dradriver/device"
)

const (
	// maxAge ends a condition that clears by age, counted from its last fact.
	maxAge = 10 * time.Minute
	// maxRecent bounds the facts remembered of one code for its repeat rule.
	maxRecent = 8
	// maxCodes bounds the distinct codes counted for a device; facts of more
	// codes still set conditions.
	maxCodes = 256
)

// condition is a device.Condition with what decides its future.
type condition struct {
	device.Condition

	Clear clearRule       `json:"clear"`
	Last  time.Time       `json:"last"`            // last fact of it
	Then  device.Severity `json:"then,omitempty"`  // severity it grows to
	At    time.Time       `json:"at,omitzero"`     // when it grows, zero for never
	Codes []int           `json:"codes,omitempty"` // XIDs that set it
}

// state is what is known of one device. Values are never changed in place.
type state struct {
	Conditions map[string]condition `json:"conditions,omitempty"`
	Recent     map[int][]time.Time  `json:"recent,omitempty"` // codes with a repeat rule
	Counts     map[int]uint64       `json:"counts,omitempty"` // XIDs since the state file began
	Recovery   int                  `json:"recovery,omitempty"`
}

func (s state) clone() state {
	s.Conditions = maps.Clone(s.Conditions)
	if s.Conditions == nil {
		s.Conditions = map[string]condition{}
	}
	s.Counts = maps.Clone(s.Counts)
	if s.Counts == nil {
		s.Counts = map[int]uint64{}
	}
	s.Recent = maps.Clone(s.Recent)
	if s.Recent == nil {
		s.Recent = map[int][]time.Time{}
	}
	return s
}

// conditions lists the conditions by key.
func (s state) conditions() []device.Condition {
	var list []device.Condition
	for _, key := range slices.Sorted(maps.Keys(s.Conditions)) {
		list = append(list, s.Conditions[key].Condition)
	}
	return list
}

// next is the whole decision: what a device's state is after a fact. It is
// pure. A condition's severity never falls; the condition stands as it is
// until its clear rule ends it. changed says that a reader would see a difference.
func next(table Table, before state, fact device.Fact, now time.Time) (after state, changed bool) {
	s := before.clone()
	switch fact.Kind {
	case device.FactXID:
		s.xid(table.Row(fact.Code), fact.Code, now)
	case device.FactRecovery:
		s.recovery(fact.Code, now)
	case device.FactLost:
		s.raise(device.Lost, "no-answer", device.Evict, clearByReset, "the device does not answer", now)
	case device.FactReset:
		if s.Recovery == 0 {
			s.clear(clearByReset)
		}
	case device.FactBoot:
		s.Recovery = 0
		s.clear(clearByBoot)
	case device.FactCleared:
		s.Recovery = 0
		s.clear(clearByHand)
	case device.FactPresent:
		if c, found := s.Conditions[device.Lost]; found && c.Value == "no-answer" {
			delete(s.Conditions, device.Lost)
		}
	case device.FactTime:
	}
	s.grow(now)
	return s, !slices.Equal(before.conditions(), s.conditions())
}

// wake is when the passing of time alone changes a state next, zero for never.
func wake(s state) time.Time {
	var first time.Time
	earliest := func(t time.Time) {
		if first.IsZero() || t.Before(first) {
			first = t
		}
	}
	for _, c := range s.Conditions {
		if c.Clear == clearByAge {
			earliest(c.Last.Add(maxAge))
		}
		if !c.At.IsZero() {
			earliest(c.At)
		}
	}
	return first
}

func (s state) xid(row Row, code int, now time.Time) {
	if _, found := s.Counts[code]; found || len(s.Counts) < maxCodes {
		s.Counts[code]++
	}
	for key, c := range s.Conditions {
		// A condition that another code holds up as well stands.
		if len(c.Codes) > 0 && !slices.ContainsFunc(c.Codes, func(held int) bool { return !slices.Contains(row.Cancels, held) }) {
			delete(s.Conditions, key)
		}
	}
	if row.Condition == "" {
		return
	}
	severity := row.Severity
	if row.Repeat > 0 {
		recent := slices.DeleteFunc(slices.Clone(s.Recent[code]), func(t time.Time) bool { return now.Sub(t) > row.within() })
		recent = append(recent, now)
		s.Recent[code] = recent[max(0, len(recent)-maxRecent):]
		if len(recent) >= row.Repeat {
			severity = max(severity, row.RepeatSeverity)
		}
	}
	s.raise(row.Condition, fmt.Sprintf("xid-%d", code), severity, row.clear, row.Meaning, now)
	c := s.Conditions[row.Condition]
	if !slices.Contains(c.Codes, code) && len(c.Codes) < maxCodes {
		c.Codes = append(slices.Clone(c.Codes), code)
	}
	if row.Then > c.Severity && c.At.IsZero() {
		c.Then, c.At = row.Then, now.Add(row.After.Std())
	}
	s.Conditions[row.Condition] = c
}

// recovery takes the driver's own verdict, which beats any table.
func (s *state) recovery(action int, now time.Time) {
	s.Recovery = action
	value := fmt.Sprintf("recovery-%d", action)
	switch action {
	case 0:
		for key, c := range s.Conditions {
			if len(c.Codes) == 0 && len(c.Value) > 9 && c.Value[:9] == "recovery-" {
				delete(s.Conditions, key)
			}
		}
	case 1, 6:
		s.raise(device.ResetRequired, value, device.Evict, clearByReset, "the driver asks for a reset", now)
	case 2, 7:
		s.raise(device.RebootRequired, value, device.Evict, clearByBoot, "the driver asks for a boot", now)
	case 3:
		s.raise(device.FabricDegraded, value, device.NoNew, clearByReset, "the driver asks to end peer traffic", now)
	case 4:
		s.raise(device.ResetRequired, value, device.NoNew, clearByReset, "the driver asks to drain, then to reset", now)
	case 5:
		s.raise(device.FabricDegraded, value, device.Degrade, clearByReset, "the driver asks to recover the fabric", now)
	default:
		s.raise(device.ResetRequired, value, device.NoNew, clearByReset, "the driver asks for an unknown recovery", now)
	}
}

// raise sets a condition or worsens it; it never makes one milder.
func (s state) raise(key, value string, severity device.Severity, rule clearRule, detail string, now time.Time) {
	c, found := s.Conditions[key]
	if !found {
		c = condition{Condition: device.Condition{Key: key, Value: value, Severity: severity, Since: now, Detail: detail}, Clear: rule}
	}
	if severity > c.Severity {
		c.Value, c.Severity, c.Detail = value, severity, detail
	}
	c.Clear = max(c.Clear, rule)
	c.Last = now
	s.Conditions[key] = c
}

// clear ends what the rule, or a milder one, ends.
func (s state) clear(rule clearRule) {
	maps.DeleteFunc(s.Conditions, func(_ string, c condition) bool { return c.Clear <= rule })
}

// grow applies what time alone does: worsening after a grace, ending by age.
func (s state) grow(now time.Time) {
	for key, c := range s.Conditions {
		if c.Clear == clearByAge && now.Sub(c.Last) >= maxAge {
			delete(s.Conditions, key)
			continue
		}
		if !c.At.IsZero() && !now.Before(c.At) {
			c.Severity = max(c.Severity, c.Then)
			c.Then, c.At = 0, time.Time{}
			s.Conditions[key] = c
		}
	}
}
