// Command bench is a private tool.
package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	_ "net/http/pprof"
	"net/url"
	"os"
	"os/exec"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hearth-dev/hearth/router"
	"github.com/hearth-dev/hearth/router/pool"
)

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

const head = "HTTP/1.1 200 OK\r\nDate: Sun, 29 Nov 2026 18:00:00 GMT\r\nServer: uvicorn\r\n"

func ev(i int) string {
	return fmt.Sprintf(`data: {"id":"chatcmpl-8f5d2c1b7a6e4d3f9c0b1a2d3e4f5a6b","object":"chat.completion.chunk","created":1764439200,"model":"m","choices":[{"index":0,"delta":{"content":" tok%02d"},"logprobs":null,"finish_reason":null}]}`, i) + "\n\n"
}

const usageEv = `data: {"id":"chatcmpl-8f5d2c1b7a6e4d3f9c0b1a2d3e4f5a6b","object":"chat.completion.chunk","created":1764439200,"model":"m","choices":[],"usage":{"prompt_tokens":200,"total_tokens":264,"completion_tokens":64}}` + "\n\n"

func engine(addr string) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		panic(err)
	}
	js := `{"id":"chatcmpl-8f5d2c1b7a6e4d3f","object":"chat.completion","created":1764439200,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello there, how are you doing today my friend?"},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":200,"total_tokens":212,"completion_tokens":12}}`
	jsonResp := []byte(fmt.Sprintf("%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", head, len(js), js))
	sh := head + "Content-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
	mk := func(n int, u bool) []byte {
		var b strings.Builder
		b.WriteString(sh)
		for i := range n {
			b.WriteString(chunk(ev(i)))
		}
		if u {
			b.WriteString(chunk(usageEv))
		}
		b.WriteString(chunk("data: [DONE]\n\n"))
		b.WriteString("0\r\n\r\n")
		return []byte(b.String())
	}
	s1, s1u, s64, s64u := mk(1, false), mk(1, true), mk(64, false), mk(64, true)
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			r := bufio.NewReaderSize(c, 64<<10)
			var body []byte
			for {
				mode, n, ch := "", 0, false
				for {
					line, err := r.ReadSlice('\n')
					if err != nil {
						return
					}
					if len(line) <= 2 {
						break
					}
					if len(line) > 8 && (line[0] == 'X' || line[0] == 'x') && bytes.EqualFold(line[:7], []byte("x-mode:")) {
						mode = string(bytes.TrimSpace(line[7:]))
					}
					if len(line) > 15 && bytes.EqualFold(line[:15], []byte("content-length:")) {
						n, _ = strconv.Atoi(string(bytes.TrimSpace(line[15:])))
					}
					if bytes.HasPrefix(line, []byte("Transfer-Enc")) {
						ch = true
					}
				}
				if ch {
					panic("chunked")
				}
				if cap(body) < n {
					body = make([]byte, n)
				}
				body = body[:n]
				if _, err := io.ReadFull(r, body); err != nil {
					return
				}
				u := bytes.Contains(body[:min(n, 100)], []byte("include_usage"))
				pick := func(a, b []byte) []byte {
					if u {
						return b
					}
					return a
				}
				var err error
				switch mode {
				case "one":
					_, err = c.Write(pick(s1, s1u))
				case "burst":
					_, err = c.Write(pick(s64, s64u))
				case "paced", "paced1":
					c.Write([]byte(sh))
					k := 64
					if mode == "paced1" {
						k = 2
					}
					for i := range k {
						if _, err = c.Write([]byte(chunk(ev(i)))); err != nil {
							return
						}
						time.Sleep(5 * time.Millisecond)
					}
					_, err = c.Write([]byte(chunk("data: [DONE]\n\n") + "0\r\n\r\n"))
				case "idle":
					c.Write([]byte(sh + chunk(ev(0))))
					io.Copy(io.Discard, c)
					return
				default:
					_, err = c.Write(jsonResp)
				}
				if err != nil {
					return
				}
			}
		}()
	}
}

func rp(addr, target string) {
	u, _ := url.Parse(target)
	p := httputil.NewSingleHostReverseProxy(u)
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConnsPerHost = 4096
	t.MaxIdleConns = 0
	p.Transport = t
	p.FlushInterval = -1
	p.BufferPool = nil
	http.ListenAndServe(addr, p)
}

func hearth(addr, target string) {
	cfg := router.Default()
	cfg.Listen = router.Listen{Ingress: addr, Admin: os.Getenv("ADMIN")}
	dir, _ := os.MkdirTemp("", "hb")
	cfg.Metering.File = dir + "/usage.jsonl"
	cfg.Pools = []pool.PoolConfig{{Name: "p", Endpoints: []pool.EndpointConfig{{URL: target}}}}
	cfg.Models = []pool.ModelConfig{{Name: "m", Targets: []pool.TargetConfig{{Pool: "p", ServedModel: "served", Weight: 1}}}}
	r, err := router.New(cfg, router.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		panic(err)
	}
	fmt.Println(r.Run(context.Background()))
}

func cpu(pid int) float64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
	u, _ := strconv.Atoi(f[11])
	s, _ := strconv.Atoi(f[12])
	// finer: schedstat of threads
	var ns float64
	ents, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, e := range ents {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, e.Name()))
		f := strings.Fields(string(b))
		if len(f) > 0 {
			v, _ := strconv.ParseFloat(f[0], 64)
			ns += v
		}
	}
	_ = u
	_ = s
	return ns / 1e9
}

func rss(pid int) float64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for _, l := range strings.Split(string(b), "\n") {
		if strings.HasPrefix(l, "VmRSS:") {
			f := strings.Fields(l)
			v, _ := strconv.ParseFloat(f[1], 64)
			return v
		}
	}
	return 0
}

func reqBytes(addr, mode string, size int) []byte {
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", size/45+1)[:size]
	stream := ""
	if mode != "json" && mode != "big" {
		stream = `,"stream":true`
	}
	body := fmt.Sprintf(`{"messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"%s"}],"model":"m","max_tokens":64,"temperature":0.7%s}`, text, stream)
	return []byte(fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nAccept: application/json\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 3.57.0\r\nAuthorization: Bearer sk-abcdef\r\nX-Mode: %s\r\nContent-Length: %d\r\n\r\n%s", addr, mode, len(body), body))
}

func readResp(r *bufio.Reader) (int, error) {
	n, ch := 0, false
	line, err := r.ReadSlice('\n')
	if err != nil {
		return 0, err
	}
	if !bytes.HasPrefix(line, []byte("HTTP/1.1 200")) {
		rest, _ := r.Peek(r.Buffered())
		return 0, fmt.Errorf("%s %s", line, rest)
	}
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		if len(line) <= 2 {
			break
		}
		if bytes.HasPrefix(line, []byte("Content-Length:")) {
			n, _ = strconv.Atoi(string(bytes.TrimSpace(line[15:])))
		}
		if bytes.HasPrefix(line, []byte("Transfer-Encoding:")) {
			ch = true
		}
	}
	if !ch {
		_, err := r.Discard(n)
		return n, err
	}
	total := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		k, _ := strconv.ParseInt(string(bytes.TrimSpace(line)), 16, 64)
		if _, err := r.Discard(int(k) + 2); err != nil {
			return 0, err
		}
		total += int(k)
		if k == 0 {
			return total, nil
		}
	}
}

func load(addr, mode string, conns int, dur time.Duration, size int) (n int64, lat []time.Duration) {
	req := reqBytes(addr, mode, size)
	var count atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	end := time.Now().Add(dur)
	for range conns {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, err := net.Dial("tcp", addr)
			if err != nil {
				panic(err)
			}
			defer c.Close()
			r := bufio.NewReaderSize(c, 32<<10)
			var l []time.Duration
			for time.Now().Before(end) {
				t := time.Now()
				if _, err := c.Write(req); err != nil {
					panic(err)
				}
				if _, err := readResp(r); err != nil {
					panic(err)
				}
				l = append(l, time.Since(t))
				count.Add(1)
			}
			mu.Lock()
			lat = append(lat, l...)
			mu.Unlock()
		}()
	}
	wg.Wait()
	sort.Slice(lat, func(i, j int) bool { return lat[i] < lat[j] })
	return count.Load(), lat
}

func paced200(addr string, dur time.Duration) time.Duration {
	req := reqBytes(addr, "json", 700)
	type cn struct {
		c net.Conn
		r *bufio.Reader
	}
	free := make(chan cn, 100)
	for range 20 {
		c, _ := net.Dial("tcp", addr)
		free <- cn{c, bufio.NewReaderSize(c, 4096)}
	}
	var mu sync.Mutex
	var lat []time.Duration
	var wg sync.WaitGroup
	tk := time.NewTicker(5 * time.Millisecond)
	end := time.Now().Add(dur)
	for time.Now().Before(end) {
		<-tk.C
		wg.Add(1)
		go func() {
			defer wg.Done()
			c := <-free
			t := time.Now()
			c.c.Write(req)
			readResp(c.r)
			d := time.Since(t)
			free <- c
			mu.Lock()
			lat = append(lat, d)
			mu.Unlock()
		}()
	}
	wg.Wait()
	sort.Slice(lat, func(i, j int) bool { return lat[i] < lat[j] })
	return lat[len(lat)/2]
}

func start(core string, args ...string) *exec.Cmd {
	c := exec.Command("taskset", append([]string{"-c", core, os.Args[0]}, args...)...)
	c.Stderr = os.Stderr
	c.Env = append(os.Environ(), "GOMAXPROCS="+os.Getenv("GMP"))
	if os.Getenv("GMP") == "" {
		c.Env = os.Environ()
	}
	if err := c.Start(); err != nil {
		panic(err)
	}
	return c
}

func wait(addr string) {
	for range 200 {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "engine":
			engine(os.Args[2])
		case "rp":
			rp(os.Args[2], os.Args[3])
		case "hearth":
			hearth(os.Args[2], os.Args[3])
		}
		if os.Args[1] != "run" {
			return
		}
	}
	rounds, _ := strconv.Atoi(os.Args[2])
	modes := strings.Split(os.Args[3], ",")
	e := start("1", "engine", "127.0.0.1:19100")
	defer e.Process.Kill()
	wait("127.0.0.1:19100")
	a := start("0", "rp", "127.0.0.1:19101", "http://127.0.0.1:19100")
	defer a.Process.Kill()
	os.Setenv("ADMIN", "127.0.0.1:19103")
	b := start("0", "hearth", "127.0.0.1:19102", "http://127.0.0.1:19100")
	defer b.Process.Kill()
	wait("127.0.0.1:19101")
	wait("127.0.0.1:19102")
	exec.Command("taskset", "-p", "2", strconv.Itoa(os.Getpid())).Run()
	fmt.Printf("rss idle R %.1f H %.1f MiB\n", rss(a.Process.Pid)/1024, rss(b.Process.Pid)/1024)
	for _, mode := range modes {
		if mode == "idle" {
			for _, x := range []struct {
				n    string
				addr string
				pid  int
			}{{"R", "127.0.0.1:19101", a.Process.Pid}, {"H", "127.0.0.1:19102", b.Process.Pid}} {
				before := rss(x.pid)
				var cs []net.Conn
				req := reqBytes(x.addr, "idle", 700)
				for range 2000 {
					c, err := net.Dial("tcp", x.addr)
					if err != nil {
						panic(err)
					}
					c.Write(req)
					buf := make([]byte, 1024)
					c.Read(buf)
					cs = append(cs, c)
				}
				time.Sleep(3 * time.Second)
				c0 := cpu(x.pid)
				time.Sleep(2 * time.Second)
				fmt.Printf("idle %s: %.1f KB/stream (rss %.0f -> %.0f), idle cpu %.2f%%\n", x.n, (rss(x.pid)-before)/2000, before/1024, rss(x.pid)/1024, (cpu(x.pid)-c0)*50)
				for _, c := range cs {
					c.Close()
				}
			}
			continue
		}
		if mode == "lat" {
			for range rounds {
				fmt.Println("p50 at 200/s: direct", paced200("127.0.0.1:19100", 3*time.Second), "R", paced200("127.0.0.1:19101", 3*time.Second), "H", paced200("127.0.0.1:19102", 3*time.Second))
			}
			continue
		}
		conns, size, d := 16, 700, 1500*time.Millisecond
		if mode == "paced" || mode == "paced1" {
			conns = 128
		}
		if mode == "big" {
			size, conns = 400<<10, 4
		}
		var ra, rb, rat []float64
		for i := range rounds + 1 {
			run := func(addr string, pid int) float64 {
				c0 := cpu(pid)
				n, _ := load(addr, mode, conns, d, size)
				return (cpu(pid) - c0) / float64(n) * 1e6
			}
			x := run("127.0.0.1:19101", a.Process.Pid)
			y := run("127.0.0.1:19102", b.Process.Pid)
			if i > 0 {
				ra, rb, rat = append(ra, x), append(rb, y), append(rat, y/x)
			}
		}
		sort.Float64s(ra)
		sort.Float64s(rb)
		sort.Float64s(rat)
		fmt.Printf("%-7s R %7.1f us  H %7.1f us  ratio %.3f  %v\n", mode, ra[len(ra)/2], rb[len(rb)/2], rat[len(rat)/2], rat)
	}
}
