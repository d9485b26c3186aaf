package bench

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// apiToken is the administrator of the API server that the bench starts.
const apiToken = "bench"

// errNoKubernetes says that there is no real API server to measure against.
var errNoKubernetes = errors.New("no real API server here: `make lab` builds one, and --kubeconfig FILE takes that of any cluster")

// findKubernetes finds the program of the lab that is etcd and API server in
// one, the one built last.
func findKubernetes() (string, error) {
	cache := os.Getenv("KUBELAB_CACHE")
	if cache == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", errNoKubernetes
		}
		cache = filepath.Join(user, "hearth", "kubelab")
	}
	found, err := filepath.Glob(filepath.Join(cache, "programs", "*", "kubernetes"))
	if err != nil {
		return "", fmt.Errorf("find API server: %w", err)
	}
	newest, when := "", time.Time{}
	for _, path := range found {
		if info, err := os.Stat(path); err == nil && info.ModTime().After(when) {
			newest, when = path, info.ModTime()
		}
	}
	if newest == "" {
		return "", errNoKubernetes
	}
	return newest, nil
}

// realAPI is etcd and an API server of their own, on loopback.
type realAPI struct {
	etcd, server *process
	config       *rest.Config
}

func startRealAPI(ctx context.Context, program, dir string) (*realAPI, error) {
	var addrs [3]string
	for i := range addrs {
		addr, err := freeAddr(ctx)
		if err != nil {
			return nil, err
		}
		addrs[i] = addr
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make API server's directory: %w", err)
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, fmt.Errorf("make API server's key: %w", err)
	}
	keyFile, tokens := filepath.Join(dir, "accounts.key"), filepath.Join(dir, "tokens.csv")
	pemKey := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	if err := errors.Join(os.WriteFile(keyFile, pemKey, 0o600), os.WriteFile(tokens, []byte(apiToken+",bench,bench,system:masters\n"), 0o600)); err != nil {
		return nil, fmt.Errorf("write API server's files: %w", err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, fmt.Errorf("write API server's log: %w", err)
	}
	defer func() { _ = log.Close() }()
	api := &realAPI{}
	client, peer := "http://"+addrs[0], "http://"+addrs[1]
	if api.etcd, err = startProgram(ctx, -1, addrs[0], log, program, "etcd", "--name=bench", "--data-dir="+filepath.Join(dir, "etcd"), "--log-level=warn",
		"--listen-client-urls="+client, "--advertise-client-urls="+client, "--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=bench="+peer); err != nil {
		return nil, err
	}
	_, port, err := net.SplitHostPort(addrs[2])
	if err != nil {
		api.etcd.stop()
		return nil, fmt.Errorf("start API server: %w", err)
	}
	if api.server, err = startProgram(ctx, -1, addrs[2], log, program, "kube-apiserver", "--etcd-servers="+client, "--bind-address=127.0.0.1", "--secure-port="+port,
		"--cert-dir="+filepath.Join(dir, "certs"), "--token-auth-file="+tokens, "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
		"--service-account-key-file="+keyFile, "--service-account-signing-key-file="+keyFile, "--service-account-issuer=https://bench.invalid"); err != nil {
		api.etcd.stop()
		return nil, err
	}
	api.config = asAgents(&rest.Config{Host: "https://" + addrs[2], BearerToken: apiToken, TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
	return api, api.ready(ctx)
}

// clusterConfig leads to the cluster of a kubeconfig file.
func clusterConfig(file string) (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", file)
	if err != nil {
		return nil, fmt.Errorf("read --kubeconfig: %w", err)
	}
	return asAgents(config), nil
}

// asAgents makes a client speak as an agent's does, and without its limit: it
// stands for many nodes.
func asAgents(config *rest.Config) *rest.Config {
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.QPS = -1
	return config
}

// ready waits until the API server has what it makes for itself at its start.
func (a *realAPI) ready(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(a.config)
	if err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	retry := time.NewTicker(100 * time.Millisecond)
	defer retry.Stop()
	for {
		text, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			a.stop()
			return fmt.Errorf("wait for API server: %s: %w", text, err)
		}
	}
}

func (a *realAPI) stop() {
	a.server.stop()
	a.etcd.stop()
}
