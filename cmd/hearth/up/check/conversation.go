package check

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/hearth-dev/hearth/test/sim/engine"
)

// The load of the routing steps. The number of conversations is prime to the
// four engines, so that a policy that only takes turns never comes back to the
// same engine by chance.
const (
	conversations = 9
	turns         = 6
	systemWords   = 300
	turnWords     = 100
	answerTokens  = 64 // at most
)

// dialogues makes the users' side of the conversations: a system prompt and
// the turns. They share no prefix and are the same in every run.
func dialogues() [][]string {
	all := make([][]string, conversations)
	for c := range all {
		rng := rand.New(rand.NewPCG(uint64(c)+1, 20))
		text := func(words int) string {
			var b strings.Builder
			for range words {
				fmt.Fprintf(&b, "w%03d ", rng.IntN(1000))
			}
			return b.String()
		}
		all[c] = append(all[c], text(systemWords))
		for range turns {
			all[c] = append(all[c], text(turnWords))
		}
	}
	return all
}

// ideal counts the prompt tokens that one endless cache would have found: what
// routing can reach at most.
type ideal struct {
	blockTokens int
	seen        map[uint64]bool
	hits        int
}

func newIdeal(blockTokens int) *ideal {
	return &ideal{blockTokens: blockTokens, seen: map[uint64]bool{}}
}

// add counts a prompt and remembers it with its answer.
func (i *ideal) add(messages []message, answer string) error {
	list := make([]engine.Message, len(messages))
	for n, m := range messages {
		content, err := json.Marshal(m.Content)
		if err != nil {
			return fmt.Errorf("encode message: %w", err)
		}
		list[n] = engine.Message{Role: m.Role, Content: content}
	}
	prompt, err := engine.Render(list, nil)
	if err != nil {
		return fmt.Errorf("render messages: %w", err)
	}
	limit := (engine.Tokens(len(prompt)) - 1) / i.blockTokens
	for n, hash := range engine.Blocks(prompt, i.blockTokens) {
		if n >= limit || !i.seen[hash] {
			break
		}
		i.hits += i.blockTokens
	}
	for _, hash := range engine.Blocks(append(prompt, answer...), i.blockTokens) {
		i.seen[hash] = true
	}
	return nil
}

// converseResult is what the answers of all conversations add up to.
type converseResult struct {
	idealHits   int     // tokens
	prompt      int     // prompt tokens
	laterTTFTMS float64 // mean simulated prefill time of turns after the first
}

// converse sends every conversation turn by turn: the first turn of each, then
// the second of each, and so on, one request at a time.
func converse(ctx context.Context, c *client, model string, blockTokens int) (converseResult, error) {
	var out converseResult
	best := newIdeal(blockTokens)
	texts := dialogues()
	histories := make([][]message, len(texts))
	later := 0
	for turn := range turns {
		for n, text := range texts {
			if turn == 0 {
				histories[n] = []message{{"system", text[0]}}
			}
			histories[n] = append(histories[n], message{"user", text[turn+1]})
			answer, err := c.chat(ctx, chatRequest{
				Model: model, Messages: histories[n], MaxTokens: answerTokens, Stream: true,
			}, nil)
			if err != nil {
				return out, fmt.Errorf("send turn %d of conversation %d: %w", turn+1, n+1, err)
			}
			if err := best.add(histories[n], answer.Text); err != nil {
				return out, err
			}
			histories[n] = append(histories[n], message{"assistant", answer.Text})
			out.prompt += answer.Prompt
			if turn > 0 {
				out.laterTTFTMS += answer.PromptMS
				later++
			}
		}
	}
	out.idealHits = best.hits
	out.laterTTFTMS /= float64(later)
	return out, nil
}
