// Command probe is what the lab's own tests run in pods: `probe serve` leaves
// its node's name in directories and tells it over HTTP, `probe get` fetches an
// address. It shows that a pod reaches what it should, and nothing more.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err := errors.New("usage: probe serve | probe get URL [CA]")
	switch {
	case len(os.Args) == 2 && os.Args[1] == "serve":
		err = serve(ctx)
	case len(os.Args) > 2 && os.Args[1] == "get":
		err = get(ctx, os.Args[2], os.Args[3:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

// serve answers until it is told to end. NODE is its node's name, DIRS the
// directories to leave it in.
func serve(ctx context.Context) error {
	node := os.Getenv("NODE")
	for dir := range strings.FieldsSeq(os.Getenv("DIRS")) {
		if err := os.WriteFile(filepath.Join(dir, "node"), []byte(node), 0o644); err != nil {
			return err
		}
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /node", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, node) })
	mux.HandleFunc("GET /boot", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.TrimSpace(string(boot))) })
	server := &http.Server{Addr: ":8080", Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { server.Close() })
	fmt.Println("serving on", node)
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func get(ctx context.Context, url string, ca []string) error {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if len(ca) > 0 {
		text, err := os.ReadFile(ca[0])
		if err != nil {
			return err
		}
		config.RootCAs = x509.NewCertPool()
		config.RootCAs.AppendCertsFromPEM(text)
	}
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{TLSClientConfig: config}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	_, err = io.Copy(os.Stdout, response.Body)
	return err
}
