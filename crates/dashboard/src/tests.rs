//! Pages as a browser gets them, for example answers of agents.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use axum::body::Body;
use axum::http::Request;
use axum::serve::Listener;
use client::cluster::Known;
use client::cluster::example::{known, silent};
use http_body_util::BodyExt;
use tokio::net::TcpStream;
use tower::ServiceExt;

use super::*;

const EVIL: &str = "</script><script>alert(1)</script>\"'&";

struct Browser {
    router: Router,
    site: Arc<Dashboard>,
    cookie: Option<String>,
}

impl Browser {
    fn new(known: Known, read_only: bool) -> Self {
        let gate = Gate::new("127.0.0.1:7880".parse().unwrap(), read_only).unwrap();
        let cluster = Arc::new(Cluster::example(known));
        let site = Arc::new(Dashboard { gate, cluster, announce: |_| () });
        Self { router: router(Arc::clone(&site)), site, cookie: None }
    }

    /// A browser that was admitted by the address.
    async fn let_in(known: Known, read_only: bool) -> Self {
        let mut browser = Self::new(known, read_only);
        let address = browser.site.gate.address();
        let path = address.strip_prefix("http://127.0.0.1:7880").unwrap();
        let answer = browser.send("GET", path, "").await;
        let cookie = answer.headers()["set-cookie"].to_str().unwrap();
        browser.cookie = cookie.split(';').next().map(str::to_owned);
        let (status, text) = text(answer).await;
        assert_eq!(status, StatusCode::OK);
        assert!(text.contains(&format!("url={}\"", browser.site.gate.path(""))), "{text}");
        browser
    }

    async fn send(&self, method: &str, path: &str, body: &str) -> Response {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "127.0.0.1:7880")
            .header("content-type", "application/x-www-form-urlencoded");
        if let Some(cookie) = &self.cookie {
            request = request.header("cookie", cookie);
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn page(&self, page: &str) -> (StatusCode, String) {
        let answer = self.send("GET", &self.site.gate.path(page), "").await;
        let policy = answer.headers()["content-security-policy"].to_str().unwrap().to_owned();
        assert!(policy.starts_with("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        text(answer).await
    }
}

async fn text(answer: Response) -> (StatusCode, String) {
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn connections_beyond_the_bound_wait() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut few = few(listener);
    let mut clients = Vec::new();
    for _ in 0..=CONNECTIONS_MAX {
        clients.push(TcpStream::connect(address).await.unwrap());
    }
    let mut served = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        served.push(few.accept().await);
    }
    let mut next = pin!(few.accept());
    assert!(poll_fn(|context| Poll::Ready(next.as_mut().poll(context))).await.is_pending());
    served.pop();
    next.await;
}

#[tokio::test]
async fn looking_at_the_address_without_opening_it_leaves_its_key() {
    let browser = Browser::new(known("web1"), false);
    let address = browser.site.gate.address();
    let path = address.strip_prefix("http://127.0.0.1:7880").unwrap();
    let head = browser.send("HEAD", path, "").await;
    assert_eq!(head.status(), StatusCode::NO_CONTENT);
    assert!(!head.headers().contains_key("set-cookie"));
    assert_eq!(browser.site.gate.address(), address);
    assert_eq!(browser.send("GET", path, "").await.status(), StatusCode::OK);
}

const PAGES: [&str; 6] = ["", "vms", "history", "evacuate", "host?name=host-a", "no-such-page"];

#[tokio::test]
async fn all_pages_show_what_agents_report() {
    let browser = Browser::let_in(known("web1"), false).await;
    for (page, says) in [
        ("", "web1"),
        ("", "about 5.50 s"),
        ("", "the network"),
        ("", "1 migration runs."),
        ("vms", "web2"),
        ("history", "38 ms"),
        ("evacuate", "host-a (2 VMs)"),
        ("host?name=host-a", "VMs on host-a"),
        ("move?from=host-a&vm=web2", "host-b (8.00 GiB free)"),
        ("style.css", "prefers-color-scheme"),
        ("script.js", "use strict"),
        ("icon.svg", "<svg"),
    ] {
        let (status, text) = browser.page(page).await;
        assert_eq!(status, StatusCode::OK, "{page}");
        assert!(text.contains(says), "{says:?} is not in {page}: {text}");
    }
    for page in ["host?name=host-z", "move?from=host-b&vm=web2", "no-such-page"] {
        assert_eq!(browser.page(page).await.0, StatusCode::NOT_FOUND, "{page}");
    }
}

#[tokio::test]
async fn what_may_be_old_is_said_to_be() {
    let old = [
        ("", "no agent answers at"),
        ("vms", "no agent answers at"),
        ("vms", "No answer from host-b. "),
        ("history", "no agent answers at"),
        ("host?name=host-b", "no agent answers at"),
        ("host?name=host-b", "the agent of host-b can't be reached"),
    ];
    let browser = Browser::let_in(silent(), false).await;
    for (page, says) in old {
        let (_, text) = browser.page(page).await;
        assert!(text.contains(says), "{says:?} is not in {page}: {text}");
    }
    let browser = Browser::let_in(known("web1"), false).await;
    for (page, _) in old {
        let (_, text) = browser.page(page).await;
        assert!(!text.contains("class=\"alert\""), "{page}: {text}");
    }
}

#[tokio::test]
async fn names_cannot_bring_markup() {
    let browser = Browser::let_in(known(EVIL), false).await;
    let form = pages_link(EVIL);
    for page in PAGES.into_iter().chain([form.as_str()]) {
        let (_, text) = browser.page(page).await;
        assert!(!text.contains("<script>"), "{page}: {text}");
        assert_eq!(text.matches("<script").count(), 1, "{page}");
        assert!(!text.contains("\"'"), "{page}");
    }
    assert!(browser.page(&form).await.1.contains("&lt;/script&gt;"));
}

fn pages_link(vm: &str) -> String {
    format!("move?from=host-a&vm={}", client::segment(vm))
}

#[tokio::test]
async fn nothing_is_loaded_from_elsewhere_and_nothing_is_inline() {
    let browser = Browser::let_in(known("web1"), false).await;
    for page in PAGES {
        let (_, text) = browser.page(page).await;
        for outside in ["http://", "https://", "style=", "<style", "onclick", "javascript:"] {
            assert!(!text.contains(outside), "{outside} is in {page}");
        }
    }
}

#[tokio::test]
async fn a_stranger_gets_nothing() {
    let browser = Browser::new(known("web1"), false);
    for page in PAGES.into_iter().chain(["style.css", "script.js"]) {
        let (status, text) = browser.page(page).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{page}");
        assert!(!text.contains("web1"), "{page}: {text}");
    }
    let (status, _) = text(browser.send("GET", "/open?key=0", "").await).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    assert_eq!(browser.send("GET", "/", "").await.status(), StatusCode::FORBIDDEN);
    // Browsers request it by themselves, and would show an error.
    let (status, text) = text(browser.send("GET", "/favicon.ico", "").await).await;
    assert_eq!((status, text.as_str()), (StatusCode::NO_CONTENT, ""));
}

#[tokio::test]
async fn an_order_without_the_forms_token_is_refused() {
    let browser = Browser::let_in(known("web1"), false).await;
    let token = browser.site.gate.token();
    for page in ["move", "evacuate", "cancel"] {
        let path = browser.site.gate.path(page);
        for body in ["", "token=", "token=0", &token[1..], &format!("tokens={token}")] {
            let (status, text) = text(browser.send("POST", &path, body).await).await;
            assert_eq!(status, StatusCode::FORBIDDEN, "{page} {body}: {text}");
        }
        // With the token, it would get as far as an agent, but there is none here.
        let right = format!("token={token}&downtime_ms=0");
        let (status, _) = text(browser.send("POST", &path, &right).await).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{page}");
        let large = format!("token={token}&vm={}", "x".repeat(1 << 20));
        let (status, _) = text(browser.send("POST", &path, &large).await).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{page}");
    }
}

#[tokio::test]
async fn a_read_only_dashboard_has_no_forms_for_changes() {
    let browser = Browser::let_in(known("web1"), true).await;
    let token = browser.site.gate.token();
    for page in PAGES.into_iter().chain(["move?from=host-a&vm=web2"]) {
        let (_, text) = browser.page(page).await;
        assert!(!text.contains("method=\"post\"") && !text.contains(token), "{page}: {text}");
    }
    let path = browser.site.gate.path("cancel");
    let (status, _) = text(browser.send("POST", &path, &format!("token={token}")).await).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn rows_are_filtered_without_a_script() {
    let browser = Browser::let_in(known("web1"), false).await;
    let (_, text) = browser.page("vms?q=WEB2+host-a").await;
    assert!(text.contains("web2") && !text.contains("<th scope=\"row\">web1"), "{text}");
    assert!(browser.page("vms?q=%3Cb%3E").await.1.contains("value=\"&lt;b&gt;\""));
}

#[tokio::test]
async fn vms_whose_qemu_was_replaced_are_marked_and_found() {
    let mut known = known("web1");
    let census = known.hosts.get_mut("host-a").and_then(|host| host.census.as_mut()).unwrap();
    census.vms[1].program_replaced = true;
    let browser = Browser::let_in(known, false).await;
    let (_, text) = browser.page("vms?q=replaced").await;
    assert!(text.contains("web2") && text.contains(">QEMU replaced<"), "{text}");
    assert!(!text.contains("<th scope=\"row\">web1"), "{text}");
}
