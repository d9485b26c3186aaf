# Every target is one line that calls go or a script; `make` alone lists them.
.DEFAULT_GOAL := help
export CGO_ENABLED ?= 0

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "%-18s %s\n", $$1, $$2}' Makefile
build: ## build hearth, hearth-agent and hearth-router into bin/
	go build -o bin/ ./cmd/...
demo: build ## two nodes, four simulated engines and the router, until Ctrl-C
	bin/hearth up
demo-check: build ## the main job, headless; ends with one line of JSON
	bin/hearth up --check
demo-real: build ## real weights and llama-server, headless; needs python3 with venv
	scripts/demo-real
test: ## every test but those with a target of their own; no root, no network, no C compiler
	go test ./...
race: ## the tests under the race detector, long ones shortened; needs a C compiler
	CGO_ENABLED=1 go test -race -short ./...
lint: ## go vet and golangci-lint, with the import law
	scripts/lint
generate: ## generate the report's Go types from its .proto, and the kernel's programs from their C
	go tool -modfile=tools/go.mod buf generate && go generate ./nodeagent/netattr/bpf
bench: build ## measure router, weights, claims, KV and network accounting; writes docs/bench and README's tables
	scripts/bench
bench-peers: build ## measure the router beside nginx, vllm-router and smg; writes docs/bench/peers
	scripts/bench-peers
crash: ## every crash and every fault at each change of the weight store, the KV store and the ledger of claims; takes an hour
	CRASH=full go test -count=1 -timeout 3h -v -run 'Crash|PowerCut|IOError|FailedSync|FullDrive|SpentQuota|FillsUp|ReadOnly|Killed|AtAnyChange' ./durable/... ./weightcache/ ./dradriver/ledger/ ./kvtier/...
fuzz: ## run every fuzz target for FUZZTIME (default 60s)
	scripts/fuzz
outside-deps: ## install the programs that test/outside runs, at their pinned versions
	scripts/outside-deps
outside-fast: build outside-deps ## outside programs against the real binaries, the fast part
	go test -count=1 -timeout 15m -tags outside -run Fast ./test/outside/...
outside-deps-full: ## the same and those of outside-full, some built from source; minutes, once
	scripts/outside-deps --full
outside-full: build outside-deps-full outside-deps-load ## outside programs against the real binaries, under faults and in more languages
	go test -count=1 -timeout 45m -parallel 4 -tags outside -run TestFull ./test/outside/...
outside-deps-load: ## install the load clients of outside-full, 900 MB
	scripts/outside-deps-load
vllm-root: ## build the real vLLM for CPU outside the tree; once, needs root and 3 GB
	scripts/vllm-root
test-vllm: build vllm-root ## the real vLLM through mirror, views and router
	HEARTH_BIN=$(CURDIR)/bin/hearth go test -count=1 -timeout 30m -tags vllm ./test/vllm/...
torture: build ## kill the real agent ROUNDS times (default 100, and 20 with a KV store) amid work and origin faults
	go run ./test/torture -rounds $(or $(ROUNDS),100) -kv $(or $(ROUNDS),20) -seed $(or $(SEED),0)
test-root: build ## the real agent on full, read-only and vanishing file systems, and network accounting in this kernel; needs root
	HEARTH_AGENT=$(CURDIR)/bin/hearth-agent go test -count=1 -timeout 20m -p 1 -tags root ./test/torture/drives/ ./nodeagent/netattr/... ./cmd/hearth/bench/
root-core: ## network accounting in this kernel, the part that every change runs; needs root
	go test -count=1 -short -timeout 5m -p 1 -tags root ./nodeagent/netattr/...
soak: build ## load routers for SOAK (default 10m) while all sorts of things fail; SEED repeats a run
	HEARTH_BIN=$(CURDIR)/bin/hearth go test -count=1 -timeout 0 -tags soak -run TestTheBooks -v ./test/soak
images: ## build Hearth's images as archives into bin/images, without Docker; TAG names them (default dev)
	scripts/images $(or $(TAG),dev)
lab: build ## a real Kubernetes of two nodes on this machine, with Hearth's images; needs root, builds for minutes once
	scripts/lab up
lab-down: ## take that cluster down
	scripts/lab down
lab-check: ## the lab itself: two nodes, pods that reach each other, reboots, and nothing left behind; needs root
	go -C test/kubelab test -count=1 -timeout 60m ./...
e2e-core: build ## Hearth on a real Kubernetes of two nodes, the part that every change runs; needs root, builds for minutes once
	scripts/e2e core
e2e-full: build ## all of it: kubelets, API servers and roles that fail, reboots, updates under load, uninstall
	scripts/e2e full
kernels: ## boot the kernels of nodes, or KERNELS=5.10,6.1 of them, under software emulation, with the tests of eBPF in each; no root
	go test -count=1 -timeout 90m -tags kernels -run TestSuitesHoldInAllKernels -v ./test/kernels/

.PHONY: kernels root-core e2e-core e2e-full images lab lab-down lab-check soak torture test-root help build demo demo-check demo-real test race lint generate bench bench-peers crash fuzz outside-deps outside-fast outside-deps-full outside-full outside-deps-load vllm-root test-vllm
