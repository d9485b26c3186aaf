package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// RunDNS answers names of services for the lab's pods, on the control plane's
// address, from the API server at each question. dir is the control plane's
// directory. Names outside of the cluster do not exist: nothing outside can be
// reached. It ends with ctx.
func RunDNS(ctx context.Context, dir string) error {
	client, err := newAPI(apiURL(), filepath.Join(dir, "pki"))
	if err != nil {
		return err
	}
	var config net.ListenConfig
	conn, err := config.ListenPacket(ctx, "udp4", net.JoinHostPort(dnsAddress, "53"))
	if err != nil {
		return fmt.Errorf("serve names: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	const maxQuestions = 64
	slots := make(chan struct{}, maxQuestions) // full: the next waits in the socket
	for {
		buffer := make([]byte, 1500)
		length, from, err := conn.ReadFrom(buffer)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("serve names: %w", err)
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			asking, cancel := context.WithTimeout(ctx, 4*time.Second)
			defer cancel()
			answer, err := answerDNS(buffer[:length], func(name string) ([]netip.Addr, error) { return client.lookup(asking, name) })
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
			if answer != nil {
				_, _ = conn.WriteTo(answer, from) // the asker asks again
			}
		}()
	}
}

// What a DNS answer says of itself (RFC 1035, section 4.1.1).
const (
	dnsOK       = 0
	dnsBad      = 1
	dnsFailed   = 2
	dnsNoName   = 3
	dnsHeader   = 12
	dnsTypeA    = 1
	dnsClassIN  = 1
	dnsTTL      = 2
	dnsMost     = 512 // bytes of an answer over UDP
	dnsIsAnswer = 0x8480
)

// answerDNS answers one question. lookup gives the addresses of a name, and
// errNotFound where there is no such name. A message that is no question has no
// answer.
func answerDNS(message []byte, lookup func(name string) ([]netip.Addr, error)) ([]byte, error) {
	if len(message) < dnsHeader || message[2]&0x80 != 0 {
		return nil, nil
	}
	name, end := dnsName(message)
	answer := append([]byte{}, message[:2]...)
	flags := dnsIsAnswer | binary.BigEndian.Uint16(message[2:])&0x0100 // as was asked for
	if end == 0 || binary.BigEndian.Uint16(message[4:]) != 1 {
		answer = binary.BigEndian.AppendUint16(answer, flags|dnsBad)
		return append(answer, 0, 0, 0, 0, 0, 0, 0, 0), nil
	}
	question := message[dnsHeader:end]
	kind := binary.BigEndian.Uint16(question[len(question)-4:])
	addresses, err := lookup(name)
	switch {
	case errors.Is(err, errNotFound):
		flags, err = flags|dnsNoName, nil
	case err != nil:
		flags |= dnsFailed
	}
	const record = 16
	most := (dnsMost - dnsHeader - len(question)) / record
	if kind != dnsTypeA {
		most = 0
	}
	addresses = addresses[:min(len(addresses), most)]
	answer = binary.BigEndian.AppendUint16(answer, flags)
	answer = append(answer, 0, 1, 0, byte(len(addresses)), 0, 0, 0, 0)
	answer = append(answer, question...)
	for _, a := range addresses {
		answer = append(answer, 0xc0, dnsHeader, 0, dnsTypeA, 0, dnsClassIN, 0, 0, 0, dnsTTL, 0, 4)
		answer = append(answer, a.AsSlice()...)
	}
	return answer, err
}

// dnsName reads the name of a message's question, in lower case and without the
// last dot, and where the question ends; 0 where it is malformed.
func dnsName(message []byte) (name string, end int) {
	var labels []string
	at := dnsHeader
	for {
		if at >= len(message) {
			return "", 0
		}
		length := int(message[at])
		at++
		if length == 0 {
			break
		}
		if length > 63 || at+length > len(message) {
			return "", 0
		}
		labels = append(labels, strings.ToLower(string(message[at:at+length])))
		at += length
	}
	if at += 4; at > len(message) {
		return "", 0
	}
	return strings.Join(labels, "."), at
}

// lookup finds the addresses of "service.namespace.svc.cluster.local": the
// service's own, or those of its ready endpoints where it is headless.
func (a *api) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	rest, ok := strings.CutSuffix(name, ".svc."+clusterDomain)
	service, namespace, dotted := strings.Cut(rest, ".")
	if !ok || !dotted || strings.Contains(namespace, ".") {
		return nil, fmt.Errorf("look up %q: %w", name, errNotFound)
	}
	var object struct{ Spec struct{ ClusterIP string } }
	path := "/api/v1/namespaces/" + url.PathEscape(namespace) + "/services/" + url.PathEscape(service)
	if err := a.do(ctx, http.MethodGet, path, nil, &object); err != nil {
		return nil, err
	}
	texts := []string{object.Spec.ClusterIP}
	if object.Spec.ClusterIP == "None" {
		var err error
		if texts, err = a.endpoints(ctx, namespace, service, ""); err != nil {
			return nil, err
		}
	}
	var found []netip.Addr
	for _, text := range texts {
		if address, err := netip.ParseAddr(text); err == nil && address.Is4() {
			found = append(found, address)
		}
	}
	return found, nil
}
