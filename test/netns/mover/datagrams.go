package mover

import (
	"context"
	"fmt"
	"net"
	"time"
)

// Datagrams are UDP packets that are answered one by one.
type Datagrams struct {
	Address string
	Count   int
	Up      int // payload of each in bytes
	Down    int // and of the answer to each
}

// Answer answers datagrams with payloads of so many bytes until Close. It gives
// its address.
func (e *End) Answer(d Datagrams, address *string) error {
	at, err := net.ResolveUDPAddr("udp", d.Address)
	if err != nil {
		return err
	}
	conn, err := net.ListenUDP("udp", at)
	if err != nil {
		return err
	}
	*address = conn.LocalAddr().String()
	e.mu.Lock()
	e.listeners = append(e.listeners, conn)
	e.mu.Unlock()
	go func() {
		b, answer := make([]byte, 64<<10), make([]byte, d.Down)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			e.received.Add(uint64(n))
			if n, err = conn.WriteToUDPAddrPort(answer, from); err == nil {
				e.sent.Add(uint64(n))
			}
		}
	}()
	return nil
}

// Ask sends datagrams and waits for the answer to each, so that no buffer is
// ever full.
func (e *End) Ask(d Datagrams, _ *Nothing) error {
	conn, err := new(net.Dialer).DialContext(context.Background(), "udp", d.Address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	b, up := make([]byte, 64<<10), make([]byte, d.Up)
	for i := range d.Count {
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		n, err := conn.Write(up)
		e.sent.Add(uint64(n))
		if err != nil {
			return err
		}
		if n, err = conn.Read(b); err != nil {
			return fmt.Errorf("wait for answer %d: %w", i, err)
		}
		e.received.Add(uint64(n))
	}
	return nil
}
