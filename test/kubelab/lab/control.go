package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hearth-dev/hearth/test/kubelab/machine"
)

// stopWithin is how long a process may take to end before it is killed.
const stopWithin = 20 * time.Second

// apiListener names the socket of this system at which the API server answers.
const apiListener = "api"

// pki makes the lab's certificates, for components and the administrator.
func (l *Lab) pki() error {
	ca, err := newAuthority("kubelab-" + l.Name)
	if err != nil {
		return err
	}
	files := map[string][]byte{"pki/ca.crt": ca.pem, "pki/ca.key": ca.keyPEM}
	for file, who := range map[string]struct {
		user      string
		groups    []string
		names     []string
		addresses []net.IP
	}{
		"apiserver": {
			user:      "kube-apiserver",
			names:     []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc." + clusterDomain},
			addresses: []net.IP{net.ParseIP(controlAddress), net.ParseIP(serviceFirst), net.IPv4(127, 0, 0, 1)},
		},
		"apiserver-kubelet": {user: "kube-apiserver-kubelet-client", groups: []string{"system:masters"}},
		"service-accounts":  {user: "service-accounts"}, // only its key is used
		"admin":             {user: "kubernetes-admin", groups: []string{"system:masters"}},
	} {
		id, err := ca.sign(who.user, who.groups, who.names, who.addresses)
		if err != nil {
			return err
		}
		files["pki/"+file+".crt"], files["pki/"+file+".key"] = id.certificate, id.key
		if file == "admin" {
			if files["kubeconfig"], err = ca.kubeconfig("kubelab-"+l.Name, l.APIServer(), "admin", id); err != nil {
				return err
			}
		}
	}
	for _, user := range []string{"kube-controller-manager", "kube-scheduler"} {
		id, err := ca.sign("system:"+user, nil, nil, nil)
		if err != nil {
			return err
		}
		if files[user+".kubeconfig"], err = ca.kubeconfig("kubelab", apiURL(), user, id); err != nil {
			return err
		}
	}
	if err := writeFiles(l.path("control"), files); err != nil {
		return err
	}
	return os.Rename(l.path("control", "kubeconfig"), l.Kubeconfig())
}

// controlProcess gives a process of the control plane's machine.
func (l *Lab) controlProcess(name string) (machine.Process, error) {
	at := func(file string) string { return l.path("control", file) }
	p := machine.Process{Name: name, Argv: []string{l.programs.Path("kubernetes"), name}}
	switch name {
	case "etcd":
		const client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
		p.Argv = append(p.Argv, "--name=lab", "--data-dir="+at("etcd"), "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls="+client, "--advertise-client-urls="+client,
			"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=lab="+peer)
	case "kube-apiserver":
		p.Argv = append(p.Argv, "--etcd-servers=http://127.0.0.1:2379",
			"--bind-address=0.0.0.0", "--secure-port="+strconv.Itoa(apiPort), "--advertise-address="+controlAddress,
			"--service-cluster-ip-range="+serviceNetwork, "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
			"--allow-privileged=true", "--client-ca-file="+at("pki/ca.crt"),
			"--tls-cert-file="+at("pki/apiserver.crt"), "--tls-private-key-file="+at("pki/apiserver.key"),
			"--kubelet-client-certificate="+at("pki/apiserver-kubelet.crt"), "--kubelet-client-key="+at("pki/apiserver-kubelet.key"),
			"--kubelet-preferred-address-types=InternalIP",
			"--service-account-key-file="+at("pki/service-accounts.key"), "--service-account-signing-key-file="+at("pki/service-accounts.key"),
			"--service-account-issuer=https://kubernetes.default.svc."+clusterDomain)
		if len(l.RuntimeConfig) > 0 {
			p.Argv = append(p.Argv, "--runtime-config="+strings.Join(l.RuntimeConfig, ","))
		}
	case "kube-controller-manager":
		p.Argv = append(p.Argv, "--kubeconfig="+at(name+".kubeconfig"), "--leader-elect=false", "--bind-address=127.0.0.1",
			"--use-service-account-credentials=true", "--root-ca-file="+at("pki/ca.crt"),
			"--service-account-private-key-file="+at("pki/service-accounts.key"),
			"--cluster-signing-cert-file="+at("pki/ca.crt"), "--cluster-signing-key-file="+at("pki/ca.key"))
	case "kube-scheduler":
		p.Argv = append(p.Argv, "--kubeconfig="+at(name+".kubeconfig"), "--leader-elect=false", "--bind-address=127.0.0.1")
	case "dns":
		p.Argv = []string{l.path("kubelab"), "dns-serve", l.path("control")}
	case "forward":
		p.Argv = []string{l.path("kubelab"), "forward-serve", l.path("control")}
		p.Inherit = l.listenerNames()
	default:
		return p, fmt.Errorf("start process: the control plane has no %q", name)
	}
	if gates := gateFlag(l.FeatureGates); gates != "" && strings.HasPrefix(name, "kube-") {
		p.Argv = append(p.Argv, "--feature-gates="+gates)
	}
	p.Argv = append(p.Argv, l.Args[name]...)
	return p, nil
}

func (l *Lab) listenerNames() []string {
	names := []string{apiListener}
	for _, f := range l.Forwards {
		names = append(names, f.Name)
	}
	return names
}

// startControl makes the control plane's machine and starts it up to an API
// server that answers.
func (l *Lab) startControl(ctx context.Context) error {
	var listeners []machine.Listener
	defer func() {
		for _, open := range listeners {
			open.File.Close()
		}
	}()
	open := func(name string, wanted int) (port int, err error) {
		file, port, err := openListener(ctx, wanted)
		if err == nil {
			listeners = append(listeners, machine.Listener{Name: name, File: file})
		}
		return port, err
	}
	var err error
	const preferred = 16443
	if l.APIPort, err = open(apiListener, preferred); err != nil {
		return err
	}
	for i, f := range l.Forwards {
		if l.Forwards[i].Local, err = open(f.Name, f.Local); err != nil {
			return err
		}
	}
	if err := l.pki(); err != nil {
		return err
	}
	if err := l.writeForwards(); err != nil {
		return err
	}
	if l.Control, err = l.createMachine(ctx, machine.Spec{Name: "control", Dir: l.path("control"), Path: hostPath}, listeners); err != nil {
		return err
	}
	if err := l.save(); err != nil {
		return err
	}
	if err := layBridge(ctx, l.Control); err != nil {
		return err
	}
	for _, name := range []string{"etcd", "kube-apiserver", "forward"} {
		if err := l.Start(ctx, name); err != nil {
			return err
		}
	}
	if l.api, err = newAPI(l.APIServer(), l.path("control", "pki")); err != nil {
		return err
	}
	if err := l.WaitAPI(ctx); err != nil {
		return err
	}
	for _, name := range []string{"kube-controller-manager", "kube-scheduler", "dns"} {
		if err := l.Start(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// createMachine makes a machine whose init is born in a cgroup of its own.
func (l *Lab) createMachine(ctx context.Context, spec machine.Spec, listeners []machine.Listener) (*machine.Machine, error) {
	group := processes(spec.Name)
	if err := l.groups.Make(group); err != nil {
		return nil, err
	}
	dir, err := l.groups.Directory(group)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	defer dir.Close()
	return machine.Create(ctx, l.path("kubelab"), spec, dir, listeners)
}

// processes names the cgroup of a machine's own processes, and pods that of a
// node's pods, which is the kubelet's. Both lie below the machine's name, so that
// everything of a node is in one tree.
func processes(machineName string) string { return filepath.Join(machineName, "processes") }

func pods(machineName string) string { return filepath.Join(machineName, "pods") }

// Start starts a process of the control plane that does not run: etcd,
// kube-apiserver, kube-controller-manager, kube-scheduler, dns or forward. args
// follow its own, for this start only: "--feature-gates=X=false".
func (l *Lab) Start(ctx context.Context, process string, args ...string) error {
	p, err := l.controlProcess(process)
	if err != nil {
		return err
	}
	p.Argv = append(slices.Clone(p.Argv), args...)
	if err := l.Control.Start(ctx, p); err != nil && !errors.Is(err, machine.ErrRunning) {
		return fmt.Errorf("start %s: %w", process, err)
	}
	return nil
}

// Stop ends a process of the control plane with SIGTERM and returns when it is gone.
func (l *Lab) Stop(ctx context.Context, process string) error {
	within := stopWithin
	if process == "kube-apiserver" {
		within = 2 * time.Second // it would wait a minute for watches, which do not end by themselves
	}
	return l.Control.Stop(ctx, process, syscall.SIGTERM, within)
}

// Kill is Stop with SIGKILL.
func (l *Lab) Kill(ctx context.Context, process string) error {
	return l.Control.Stop(ctx, process, syscall.SIGKILL, stopWithin)
}

// Restart is Stop and Start.
func (l *Lab) Restart(ctx context.Context, process string, args ...string) error {
	if err := l.Stop(ctx, process); err != nil {
		return err
	}
	return l.Start(ctx, process, args...)
}

// WaitAPI returns when the API server says that it is ready.
func (l *Lab) WaitAPI(ctx context.Context) error {
	return wait(ctx, "the API server", func(ctx context.Context) (string, error) {
		if err := l.anyEnded(ctx, l.Control, "control", "etcd", "kube-apiserver", "forward"); err != nil {
			return "", err
		}
		return reason(l.api.do(ctx, "GET", "/readyz", nil, nil)), nil
	})
}
