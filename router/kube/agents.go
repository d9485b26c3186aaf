package kube

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/router/feed"
)

const serviceLabel = discoveryv1.LabelServiceName

// stripSlice keeps of an EndpointSlice what agentsOf reads.
func stripSlice(object any) (any, error) {
	slice, ok := object.(*discoveryv1.EndpointSlice)
	if !ok {
		return object, nil
	}
	kept := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: slice.Namespace, Name: slice.Name, UID: slice.UID, ResourceVersion: slice.ResourceVersion},
		AddressType: slice.AddressType, Ports: slice.Ports,
	}
	for _, e := range slice.Endpoints {
		kept.Endpoints = append(kept.Endpoints, discoveryv1.Endpoint{
			Addresses: e.Addresses, Conditions: discoveryv1.EndpointConditions{Terminating: e.Conditions.Terminating}, NodeName: e.NodeName,
		})
	}
	return kept, nil
}

// agentsOf gives the address of each node's agent, by the node's name. Of
// several, as during an update, it is one that is not ending, then the first in
// the order of addresses, IPv4 before IPv6.
func agentsOf(objects []any, port string) map[string]string {
	type candidate struct {
		address string
		rank    int
	}
	best := map[string]candidate{}
	for _, object := range objects {
		slice, ok := object.(*discoveryv1.EndpointSlice)
		if !ok || slice.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		number := slicePort(slice, port)
		if number == 0 {
			continue
		}
		for _, e := range slice.Endpoints {
			if e.NodeName == nil || *e.NodeName == "" || len(e.Addresses) == 0 {
				continue
			}
			c := candidate{address: net.JoinHostPort(e.Addresses[0], strconv.Itoa(number))}
			if e.Conditions.Terminating != nil && *e.Conditions.Terminating {
				c.rank += 2
			}
			if slice.AddressType == discoveryv1.AddressTypeIPv6 {
				c.rank++
			}
			have, some := best[*e.NodeName]
			if !some || cmp.Or(cmp.Compare(c.rank, have.rank), cmp.Compare(c.address, have.address)) < 0 {
				best[*e.NodeName] = c
			}
		}
	}
	found := make(map[string]string, len(best))
	for node, c := range best {
		found[node] = c.address
	}
	return found
}

// slicePort finds a port by name or number, 0 where the slice has none such.
func slicePort(slice *discoveryv1.EndpointSlice, port string) int {
	for _, p := range slice.Ports {
		if p.Port == nil {
			continue
		}
		if p.Name != nil && *p.Name == port || strconv.Itoa(int(*p.Port)) == port {
			return int(*p.Port)
		}
	}
	return 0
}

// known remembers where each node's agent is or was, by the node's name.
type known map[string]agent

type agent struct {
	address string
	gone    time.Time // since when it is not listed; zero: it is
}

// take puts what is listed now over what is known, forgets who is not listed
// for forgetAgentAfter, and gives the time until the next would be, 0 for none.
func (k known) take(found map[string]string, now time.Time) (next time.Duration) {
	used := map[string]bool{}
	for node, address := range found {
		k[node] = agent{address: address}
		used[address] = true
	}
	for node, a := range k {
		if found[node] != "" {
			continue
		}
		if a.gone.IsZero() {
			a.gone = now
			k[node] = a
		}
		left := a.gone.Add(forgetAgentAfter).Sub(now)
		if left <= 0 || used[a.address] {
			// Its address may be another's by now.
			delete(k, node)
			continue
		}
		if next == 0 || left < next {
			next = left
		}
	}
	return next
}

// nodes lists the agents for the feed, sorted by the node's name.
func (k known) nodes() []feed.Node {
	list := make([]feed.Node, 0, len(k))
	for _, name := range slices.Sorted(maps.Keys(k)) {
		list = append(list, feed.Node{Address: k[name].address, Name: name})
	}
	return list
}
