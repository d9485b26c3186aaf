package pool

import (
	"cmp"
	"slices"

	"github.com/hearth-dev/hearth/router/pick"
)

// order lists the targets that may take a request, first to last: the one
// drawn by weight, the others with a weight, those without. The draw is by the
// conversation where the request is of one, so that its turns stay with one
// target. A target whose context the prompt may exceed goes behind those where
// it surely fits. Where a target lacks what the request needs, unmet says what
// the nearest one lacks.
func (m *model) order(req *pick.Request, order []int) (_ []int, unmet *UnmetNeedsError) {
	total := 0
	for i := range m.targets {
		t := &m.targets[i]
		if missing, tooLong := t.lacks(req); len(missing) > 0 || tooLong {
			unmet = nearer(unmet, m.name, t, req, missing)
			continue
		}
		order = append(order, i)
		total += t.Weight
	}
	if len(order) > 1 {
		m.drawFirst(order, cmp.Or(req.Conversation, req.Tie), total)
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return int(m.targets[a].doubt(req)) - int(m.targets[b].doubt(req))
	})
	return order, unmet
}

// drawFirst moves the target that tie draws by weight to the front, total being
// the sum of the weights. One that is not ready is drawn all the same, and then
// another behind it, so that its coming and going moves no conversation between
// the others.
func (m *model) drawFirst(order []int, tie uint64, total int) {
	for total > 0 {
		drawn := draw(tie, total)
		at := 0
		for ; drawn >= m.targets[order[at]].Weight; at++ {
			drawn -= m.targets[order[at]].Weight
		}
		i := order[at]
		copy(order[1:at+1], order[:at])
		order[0] = i
		if m.targets[i].ready {
			return
		}
		total -= m.targets[i].Weight
		tie = tie*0x9e3779b97f4a7c15 + 1
		order = order[1:]
	}
}

// draw turns a request's tie into 0..total-1. It mixes other bits than Pick
// does, so that the target does not decide the endpoint.
func draw(tie uint64, total int) int {
	x := tie*0x9e3779b97f4a7c15 + 0xd1b54a32d192ed03
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return int((x ^ x>>32) % uint64(total))
}

// lacks names the capabilities a target does not declare, and says whether the
// prompt cannot fit. The prompt's length is an estimate at 4 bytes a token; no
// text worth serving has more than 8.
func (t *target) lacks(req *pick.Request) (missing []string, tooLong bool) {
	if len(t.Capabilities) > 0 {
		for _, need := range req.Needs {
			if !slices.Contains(t.Capabilities, need) {
				missing = append(missing, need)
			}
		}
	}
	return missing, t.ContextTokens > 0 && req.PromptTokens/2 > t.ContextTokens
}

// doubt is 1 where prompt and answer may exceed the context, by the estimate.
func (t *target) doubt(req *pick.Request) uint8 {
	if t.ContextTokens > 0 && req.PromptTokens+req.MaxTokens > t.ContextTokens {
		return 1
	}
	return 0
}

func nearer(have *UnmetNeedsError, model string, t *target, req *pick.Request, missing []string) *UnmetNeedsError {
	if have == nil || len(missing) < len(have.Missing) ||
		len(missing) == 0 && len(have.Missing) == 0 && t.ContextTokens > have.ContextTokens {
		return &UnmetNeedsError{Model: model, Missing: missing, PromptTokens: req.PromptTokens, ContextTokens: t.ContextTokens}
	}
	return have
}
