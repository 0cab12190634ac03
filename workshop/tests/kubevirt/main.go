// KubeVirt's own virt-handler proxies and its record of a pod, as programs that the tests start on
// a lab's hosts: `make kubevirt-test`. All that matters is KubeVirt's code.
//
//	proxies note DIRECTORY UID SOCKET
//	proxies target UID DIRECTORY LIBVIRT-SOCKET PORTS-FILE
//	proxies source UID DIRECTORY ADDRESS PORTS
//	proxies manifests DIRECTORY
//
// Proxies run until standard input ends.
package main

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	v1 "kubevirt.io/api/core/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"

	"kubevirt.io/kubevirt/pkg/certificates"
	"kubevirt.io/kubevirt/pkg/testutils"
	virtcache "kubevirt.io/kubevirt/pkg/virt-handler/cache"
	migrationproxy "kubevirt.io/kubevirt/pkg/virt-handler/migration-proxy"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "proxies:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 4 && args[0] == "note":
		return note(args[1], args[2], args[3])
	case len(args) == 5 && args[0] == "target":
		return target(args[1], args[2], args[3], args[4])
	case len(args) == 5 && args[0] == "source":
		return source(args[1], args[2], args[3], args[4])
	case len(args) == 2 && args[0] == "manifests":
		return manifests(args[1])
	}
	return fmt.Errorf("what is wanted: note, target or source?")
}

// note writes virt-handler's record of a pod.
func note(directory, uid, socket string) error {
	store := virtcache.InitializeGhostRecordCache(virtcache.NewIterableCheckpointManager(directory))
	return store.Add("default", "vm", socket, types.UID(uid))
}

// target opens KubeVirt's proxies at the destination, and writes their ports to a file.
func target(uid, directory, libvirt, portsFile string) error {
	manager, err := manager()
	if err != nil {
		return err
	}
	sockets := []string{libvirt}
	for _, port := range migrationproxy.GetMigrationPortsList(true) {
		key := migrationproxy.ConstructProxyKey(uid, port)
		sockets = append(sockets, migrationproxy.SourceUnixFile(directory, key))
	}
	if err := manager.StartTargetListener(uid, sockets); err != nil {
		return err
	}
	ports, err := json.Marshal(manager.GetTargetListenerPorts(uid))
	if err != nil {
		return err
	}
	// Whole or not at all, since a test waits for it.
	if err := os.WriteFile(portsFile+".new", ports, 0o600); err != nil {
		return err
	}
	if err := os.Rename(portsFile+".new", portsFile); err != nil {
		return err
	}
	untilTheEnd()
	manager.StopTargetListener(uid)
	return nil
}

// source opens the proxies at the source, which lead to these ports.
func source(uid, directory, address, portsJSON string) error {
	manager, err := manager()
	if err != nil {
		return err
	}
	ports := map[string]int{}
	if err := json.Unmarshal([]byte(portsJSON), &ports); err != nil {
		return err
	}
	if err := manager.StartSourceListener(uid, address, ports, directory); err != nil {
		return err
	}
	untilTheEnd()
	manager.StopSourceListener(uid)
	return nil
}

// manager uses TLS between both ends, set up as in KubeVirt's own tests.
func manager() (migrationproxy.ProxyManager, error) {
	directory, err := os.MkdirTemp("", "proxies")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(directory)
	store, err := certificates.GenerateSelfSignedCert(directory, "test", "test")
	if err != nil {
		return nil, err
	}
	certificate, err := store.Current()
	if err != nil {
		return nil, err
	}
	config := &tls.Config{
		InsecureSkipVerify: true,
		MinVersion:         tls.VersionTLS12,
		Certificates:       []tls.Certificate{*certificate},
	}
	cluster, _, _ := testutils.NewFakeClusterConfigUsingKVConfig(&v1.KubeVirtConfiguration{})
	return migrationproxy.NewMigrationProxyManager(config, config, config, cluster), nil
}

// manifests builds what `kubectl apply -k` would send, and parses it as the API server
// does: a field that Kubernetes doesn't know is an error.
func manifests(directory string) error {
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), directory)
	if err != nil {
		return err
	}
	for _, resource := range built.Resources() {
		text, err := resource.AsYAML()
		if err != nil {
			return err
		}
		known, err := scheme.Scheme.New(schema.FromAPIVersionAndKind(resource.GetGvk().ApiVersion(), resource.GetKind()))
		if err != nil {
			return err
		}
		if err := yaml.UnmarshalStrict(text, known); err != nil {
			return fmt.Errorf("%s: %w", resource.CurId(), err)
		}
		fmt.Println(resource.CurId())
	}
	return nil
}

func untilTheEnd() {
	_, _ = io.Copy(io.Discard, os.Stdin)
}
