package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// request is one logical request, which may follow redirects.
type request struct {
	method   string // empty: GET
	op, what string
	url      *url.URL
	header   http.Header
	// stay refuses redirects to another origin.
	stay bool
	// hop sees every answer before it is judged, redirects included.
	hop func(resp *http.Response) error
	// prepare adds headers to the request of each hop.
	prepare func(req *http.Request)
}

// do sends a request and follows its redirects. On success the answer has a
// status below 300 and the caller closes its body; every error is an *Error.
func (h *Hub) do(ctx context.Context, r request) (*http.Response, error) {
	token, err := h.token()
	if err != nil {
		return nil, h.refuse(r.op, r.what, err)
	}
	at, seen := r.url, map[string]bool{}
	for range maxRedirects + 1 {
		if seen[at.String()] {
			return nil, h.refuse(r.op, r.what, fmt.Errorf("%w: redirect loop", ErrProtocol))
		}
		seen[at.String()] = true
		resp, err := h.hop(ctx, r, at, token)
		if err != nil {
			return nil, h.refuse(r.op, r.what, err)
		}
		if r.hop != nil {
			if err := r.hop(resp); err != nil {
				discard(resp)
				return nil, h.refuse(r.op, r.what, err)
			}
		}
		if resp.StatusCode < 300 {
			return resp, nil
		}
		next, err := h.redirect(resp, r.stay)
		if err != nil {
			err = h.statusError(r, resp, len(seen) > 1, err)
		}
		discard(resp)
		if err != nil {
			return nil, err
		}
		at = next
	}
	return nil, h.refuse(r.op, r.what, fmt.Errorf("%w: more than %d redirects", ErrProtocol, maxRedirects))
}

// hop sends one request. The token goes to the configured origin only.
func (h *Hub) hop(ctx context.Context, r request, at *url.URL, token string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, cmp.Or(r.method, http.MethodGet), at.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("%w: bad address", ErrProtocol)
	}
	maps.Copy(req.Header, r.header)
	req.Header.Set("User-Agent", h.opts.UserAgent)
	req.Header.Set("Accept-Encoding", "identity")
	if token != "" && sameOrigin(at, h.base) {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if r.prepare != nil {
		r.prepare(req)
	}
	resp, err := h.pools.do(req)
	if err != nil {
		return nil, transportError(ctx, err)
	}
	return resp, nil
}

// transportError strips the address, which may carry a signature, and keeps a
// cancelled ctx recognisable.
func transportError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

var errNoRedirect = errors.New("not a redirect")

// redirect judges a 3xx answer and returns where it points; errNoRedirect for
// any other status.
func (h *Hub) redirect(resp *http.Response, stay bool) (*url.URL, error) {
	switch resp.StatusCode {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
	default:
		return nil, errNoRedirect
	}
	from := resp.Request.URL
	next, err := from.Parse(resp.Header.Get("Location"))
	switch {
	case err != nil || resp.Header.Get("Location") == "":
		return nil, fmt.Errorf("%w: redirect without a usable address", ErrProtocol)
	case next.Scheme != "http" && next.Scheme != "https" || next.Host == "":
		return nil, fmt.Errorf("%w: redirect to scheme %.20q", ErrProtocol, next.Scheme)
	case from.Scheme == "https" && next.Scheme == "http":
		return nil, fmt.Errorf("%w: redirect from https to http", ErrProtocol)
	case next.User != nil:
		return nil, fmt.Errorf("%w: redirect to an address with credentials", ErrProtocol)
	case stay && !sameOrigin(from, next):
		return nil, fmt.Errorf("%w: metadata redirected to another origin, host %.100q", ErrProtocol, next.Host)
	}
	next.Fragment, next.RawFragment = "", ""
	return next, nil
}

// statusError turns a refusing answer, perhaps to a redirected request, into an
// *Error.
func (h *Hub) statusError(r request, resp *http.Response, redirected bool, cause error) error {
	e := &Error{Source: h.opts.Name, Op: r.op, What: r.what, Status: resp.StatusCode, Err: cause}
	if !errors.Is(cause, errNoRedirect) {
		return e
	}
	e.Err = classify(resp.StatusCode, resp.Header.Get("X-Error-Code"), redirected)
	if errors.Is(e.Err, ErrThrottled) || errors.Is(e.Err, ErrUnavailable) {
		e.RetryAfter = retryAfter(resp.Header, h.opts.Now())
	}
	if reason := printable(resp.Header.Get("X-Error-Message")); reason != "" {
		e.Err = h.redact(fmt.Errorf("%w: %s", e.Err, reason))
	}
	return e
}

// classify maps a status, and the hub's error code where it says more, to a
// sentinel. An address that a redirect led to is a signed one: where it answers
// 401 or 403 it has expired, and asking the hub again gives a new one.
func classify(status int, code string, redirected bool) error {
	switch {
	case code == "GatedRepo" && status == http.StatusUnauthorized:
		return ErrUnauthorized
	case code == "GatedRepo":
		return ErrForbidden
	case redirected && (status == http.StatusUnauthorized || status == http.StatusForbidden):
		return fmt.Errorf("%w: signed address refused", ErrUnavailable)
	case status == http.StatusUnauthorized, status == http.StatusProxyAuthRequired:
		return ErrUnauthorized
	case status == http.StatusForbidden, status == http.StatusUnavailableForLegalReasons:
		return ErrForbidden
	case code == "RevisionNotFound":
		return ErrNoRevision
	case status == http.StatusNotFound, status == http.StatusGone:
		return ErrNotFound
	case status == http.StatusPreconditionFailed, status == http.StatusRequestedRangeNotSatisfiable:
		return ErrChanged
	case status == http.StatusTooManyRequests:
		return ErrThrottled
	case status == http.StatusRequestTimeout, status == http.StatusTooEarly, status >= 500:
		return ErrUnavailable
	}
	return ErrProtocol
}

// maxRetryAfter bounds what a source may ask for.
const maxRetryAfter = time.Hour

// retryAfter reads the pause that an answer asks for: Retry-After in seconds
// or as a date, else the reset of an exhausted RateLimit (the IETF draft's "t"
// parameter, or RateLimit-Reset). 0 means none; at most an hour.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if text := strings.TrimSpace(header.Get("Retry-After")); text != "" {
		if d, ok := seconds(text); ok {
			return d
		}
		if at, err := http.ParseTime(text); err == nil {
			return min(max(at.Sub(now), 0), maxRetryAfter)
		}
	}
	for item := range strings.SplitSeq(header.Get("RateLimit"), ",") {
		exhausted, reset := false, time.Duration(0)
		for param := range strings.SplitSeq(item, ";") {
			key, value, _ := strings.Cut(strings.TrimSpace(param), "=")
			switch key {
			case "r":
				exhausted = value == "0"
			case "t":
				reset, _ = seconds(value)
			}
		}
		if exhausted && reset > 0 {
			return reset
		}
	}
	d, _ := seconds(header.Get("RateLimit-Reset"))
	return d
}

func seconds(text string) (time.Duration, bool) {
	n, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || n < 0 || n != n {
		return 0, false
	}
	return time.Duration(min(n, maxRetryAfter.Seconds()) * float64(time.Second)), true
}

// printable bounds a text from outside and drops what could forge log lines.
func printable(text string) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, text)
	return strings.TrimSpace(text[:min(len(text), maxErrorReason)])
}

// discardLimit bounds the wait for what is left of a body nobody wants.
const discardLimit = time.Second

// discard reads a little of a body so that the connection can serve again,
// and closes it; a body that does not come in discardLimit is broken off.
func discard(resp *http.Response) {
	late := time.AfterFunc(discardLimit, func() { _ = resp.Body.Close() })
	defer late.Stop()
	_, _ = io.CopyN(io.Discard, resp.Body, 16<<10)
	_ = resp.Body.Close()
}
