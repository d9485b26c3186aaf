package hub

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// access is who may read what; Origin.mu guards it.
type access struct {
	gated, private []string
	// tokens are the accounts: token -> repositories it is admitted to.
	tokens map[string][]string
	// asked counts the requests that showed each token.
	asked map[string]int64
}

// SetGated names the repositories whose files and trees only those admitted may
// read; "*" means all.
func (o *Origin) SetGated(repos ...string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.access.gated = repos
}

// SetPrivate names the repositories that exist only for those admitted; "*"
// means all.
func (o *Origin) SetPrivate(repos ...string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.access.private = repos
}

// SetToken gives an account to the bearer of a token, admitted to the
// repositories named; "*" means all. Once there is an account, a token without
// one is refused wherever it is shown, as the hub does.
func (o *Origin) SetToken(token string, repos ...string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.access.tokens == nil {
		o.access.tokens = map[string][]string{}
	}
	o.access.tokens[token] = repos
}

// RemoveToken ends the account of a token.
func (o *Origin) RemoveToken(token string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.access.tokens, token)
}

// Asked counts the requests that showed a token; "" counts those that showed none.
func (o *Origin) Asked(token string) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.access.asked[token]
}

func named(list []string, repo string) bool {
	return slices.Contains(list, repo) || slices.Contains(list, "*")
}

// caller is the bearer of a request: whether its token has an account, and
// whether it is admitted to a repository.
func (o *Origin) caller(r *http.Request, repo string) (token string, known, admitted bool) {
	token, _ = strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	o.mu.Lock()
	defer o.mu.Unlock()
	repos, known := o.access.tokens[token]
	if o.opts.Token != "" && token == o.opts.Token {
		return token, true, true
	}
	return token, known, known && named(repos, repo)
}

// countToken notes which token a request showed.
func (o *Origin) countToken(r *http.Request) {
	token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.access.asked == nil {
		o.access.asked = map[string]int64{}
	}
	o.access.asked[token]++
}

// noAccount refuses a token without an account, where there are any.
func (o *Origin) noAccount(w http.ResponseWriter, r *http.Request) bool {
	token, known, _ := o.caller(r, "")
	o.mu.Lock()
	accounts := len(o.access.tokens)
	o.mu.Unlock()
	if token == "" || known || accounts == 0 {
		return false
	}
	fail(w, http.StatusUnauthorized, "", "Invalid credentials in Authorization header", "")
	return true
}

// hidden reports whether a repository does not exist for the caller, and
// answers as the hub does.
func (o *Origin) hidden(w http.ResponseWriter, r *http.Request, repo string) bool {
	o.mu.Lock()
	private := named(o.access.private, repo)
	o.mu.Unlock()
	token, _, admitted := o.caller(r, repo)
	if !private || admitted {
		return false
	}
	status := http.StatusNotFound
	if token == "" {
		status = http.StatusUnauthorized
	}
	fail(w, status, "RepoNotFound", "Repository not found", "")
	return true
}

// refused reports whether r lacks the credential that a gated repository wants,
// and answers as the hub does if so.
func (o *Origin) refused(w http.ResponseWriter, r *http.Request, repo string) bool {
	o.mu.Lock()
	gated := named(o.access.gated, repo)
	o.mu.Unlock()
	token, _, admitted := o.caller(r, repo)
	switch {
	case !gated || admitted:
		return false
	case token == "":
		fail(w, http.StatusUnauthorized, "GatedRepo", fmt.Sprintf("Access to model %s is restricted. You must be authenticated to access it.", repo), "")
	default:
		fail(w, http.StatusForbidden, "GatedRepo", fmt.Sprintf("Access to model %s is restricted and you are not in the authorized list.", repo), "")
	}
	return true
}

// said is what a repository's info tells of its access.
func (o *Origin) said(repo string) (gated any, private bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	gated = false
	if named(o.access.gated, repo) {
		gated = "manual"
	}
	return gated, named(o.access.private, repo)
}

// whoami names the account of a token.
func (o *Origin) whoami(w http.ResponseWriter, r *http.Request) {
	if token, known, _ := o.caller(r, ""); token == "" || !known {
		fail(w, http.StatusUnauthorized, "", "Invalid username or password.", "")
		return
	}
	writeJSON(w, map[string]any{"type": "user", "name": "someone", "orgs": []string{}})
}
