package pool

import "time"

// learned is what a pool finds out from the answers of its engines, as moving
// averages. The zero value knows nothing.
type learned struct {
	rate float64 // prompt tokens per second, 0 = unknown
	text float64 // bytes of canonical walk per prompt token, 0 = unknown
}

const (
	learnWeight = 0.1 // of a new sample
	learnTokens = 256 // prompts below say more of fixed costs than of the rate
	minRate     = 1.0
	maxRate     = 1e7
	defaultText = 4.0
	minText     = 1.0
	maxText     = 16.0
)

// takeRate learns from a time to first token: the engine computed this
// request's uncached tokens and those that were before it.
func (l *learned) takeRate(uncached, backlog int, ttft time.Duration) {
	if uncached < learnTokens || ttft <= 0 {
		return
	}
	sample := min(max(float64(uncached+max(backlog, 0))/ttft.Seconds(), minRate), maxRate)
	if l.rate == 0 {
		l.rate = sample
		return
	}
	l.rate += learnWeight * (sample - l.rate)
}

// takeText learns how long a token's text is.
func (l *learned) takeText(bytes, tokens int) {
	if tokens < learnTokens || bytes <= 0 {
		return
	}
	sample := min(max(float64(bytes)/float64(tokens), minText), maxText)
	if l.text == 0 {
		l.text = sample
		return
	}
	l.text += learnWeight * (sample - l.text)
}

func (l *learned) bytesPerToken() float64 {
	if l.text == 0 {
		return defaultText
	}
	return l.text
}
