// Package meter owns the usage records: who used which model, where, and how
// many tokens it took, one line per request in a durable file (METERING.md).
// The router root opens it and hands it finished requests; programs that bill
// read the file. It never decides what is charged and never reads a request's
// content.
package meter

import (
	"strconv"
	"time"
	"unicode/utf8"
)

// Schema is the format of the records this package writes.
const Schema = "hearth.dev/usage/v1"

// Record is one request's usage. Its members are those of METERING.md.
type Record struct {
	ID               string
	RequestID        string
	Time             time.Time
	Model            string
	ServedModel      string
	Consumer         string
	Pool             string
	Endpoint         string
	Accelerator      string
	Path             string
	PromptTokens     int
	CachedTokens     int
	CompletionTokens int
	Estimated        bool
	Outcome          string
	Status           int
	Stream           bool
	TTFT             time.Duration
	Duration         time.Duration
	Retries          int
}

// append adds the record's line to b.
func (r *Record) append(b []byte) []byte {
	b = append(b, `{"schema":"`+Schema+`","id":`...)
	b = quote(b, r.ID)
	b = quote(append(b, `,"requestId":`...), r.RequestID)
	b = append(b, `,"time":"`...)
	b = r.Time.UTC().AppendFormat(b, time.RFC3339Nano)
	b = quote(append(b, `","model":`...), r.Model)
	b = quote(append(b, `,"servedModel":`...), r.ServedModel)
	b = quote(append(b, `,"consumer":`...), r.Consumer)
	b = quote(append(b, `,"pool":`...), r.Pool)
	b = quote(append(b, `,"endpoint":`...), r.Endpoint)
	b = quote(append(b, `,"accelerator":`...), r.Accelerator)
	b = quote(append(b, `,"path":`...), r.Path)
	b = strconv.AppendInt(append(b, `,"promptTokens":`...), int64(r.PromptTokens), 10)
	b = strconv.AppendInt(append(b, `,"cachedTokens":`...), int64(r.CachedTokens), 10)
	b = strconv.AppendInt(append(b, `,"completionTokens":`...), int64(r.CompletionTokens), 10)
	b = strconv.AppendBool(append(b, `,"estimated":`...), r.Estimated)
	b = quote(append(b, `,"outcome":`...), r.Outcome)
	b = strconv.AppendInt(append(b, `,"status":`...), int64(r.Status), 10)
	b = strconv.AppendBool(append(b, `,"stream":`...), r.Stream)
	b = millis(append(b, `,"ttftMs":`...), r.TTFT)
	b = millis(append(b, `,"durationMs":`...), r.Duration)
	b = strconv.AppendInt(append(b, `,"retries":`...), int64(r.Retries), 10)
	return append(b, "}\n"...)
}

func millis(b []byte, d time.Duration) []byte {
	return strconv.AppendFloat(b, float64(d.Microseconds())/1000, 'f', -1, 64)
}

const hexDigits = "0123456789abcdef"

// quote appends s as a JSON string; bytes that are not UTF-8 become U+FFFD.
func quote(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < ' ':
			b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		case c < utf8.RuneSelf:
			b = append(b, c)
		default:
			r, size := utf8.DecodeRuneInString(s[i:])
			b = utf8.AppendRune(b, r)
			i += size
			continue
		}
		i++
	}
	return append(b, '"')
}
